"""Control requests: their checks, bounded streams of beats, faults of one stream."""

import json
import threading
from collections.abc import Iterator

import pytest

from shoal.backend.heartbeat import MAX_HEARTBEAT_STREAMS, ControlRequest, HeartbeatThread
from shoal.scheduler.errors import RequestError

WAIT_S = 10.0


class RecordingControl:
    def __init__(self, fails: bool = False) -> None:
        self.payloads: list[dict] = []
        self.closed = threading.Event()
        self.cancelled = False
        self.fails = fails

    def send_control(self, payload: str, final: bool) -> None:
        if self.fails:
            raise RuntimeError("gone")
        assert not self.closed.is_set()
        self.payloads.append(json.loads(payload))
        if final:
            self.closed.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def abandon(self) -> None:
        self.closed.set()


@pytest.fixture
def heartbeat() -> Iterator[HeartbeatThread]:
    thread = HeartbeatThread(lambda: {"state": "ready"})
    yield thread
    thread.close()


def test_status_is_one_answer(heartbeat: HeartbeatThread) -> None:
    reply = RecordingControl()
    heartbeat.add(ControlRequest.from_json('{"op":"status"}'), reply)
    assert reply.closed.wait(WAIT_S)
    assert reply.payloads == [{"state": "ready"}]


def test_a_stream_of_beats_ends_by_itself(heartbeat: HeartbeatThread) -> None:
    replies = [RecordingControl() for _ in range(3)]
    for reply in replies:
        heartbeat.add(ControlRequest(interval_ms=50, count=3), reply)
    for reply in replies:
        assert reply.closed.wait(WAIT_S)
        assert len(reply.payloads) == 3


def test_a_cancelled_stream_ends_early(heartbeat: HeartbeatThread) -> None:
    reply = RecordingControl()
    reply.cancelled = True
    heartbeat.add(ControlRequest(interval_ms=50, count=200), reply)
    assert reply.closed.wait(WAIT_S)
    assert len(reply.payloads) == 1


def test_a_failing_stream_harms_no_other(heartbeat: HeartbeatThread) -> None:
    broken, well = RecordingControl(fails=True), RecordingControl()
    heartbeat.add(ControlRequest(interval_ms=50, count=5), broken)
    heartbeat.add(ControlRequest(interval_ms=50, count=2), well)
    assert broken.closed.wait(WAIT_S)
    assert well.closed.wait(WAIT_S)


def test_close_ends_open_streams() -> None:
    thread = HeartbeatThread(lambda: {"state": "draining"})
    reply = RecordingControl()
    thread.add(ControlRequest(interval_ms=5000, count=240), reply)
    thread.close()
    assert reply.closed.is_set()
    with pytest.raises(RequestError):
        thread.add(ControlRequest(), RecordingControl())


def test_the_number_of_streams_is_bounded(heartbeat: HeartbeatThread) -> None:
    for _ in range(MAX_HEARTBEAT_STREAMS):
        heartbeat.add(ControlRequest(interval_ms=5000, count=2), RecordingControl())
    with pytest.raises(RequestError) as info:
        heartbeat.add(ControlRequest(interval_ms=5000, count=2), RecordingControl())
    assert info.value.status == 429
    assert info.value.retry_after_ms


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("", "control"),
        ("[]", "control"),
        ("[" * 2000, "control"),
        ('{"op":"x"}' + " " * 5000, "control"),
        ("{}", "control.op"),
        ('{"op":"reboot"}', "control.op"),
        ('{"op":["status"]}', "control.op"),
        ('{"op":"status","count":2}', "control.count"),
        ('{"op":"heartbeat","every":2}', "control.every"),
        ('{"op":"heartbeat","interval_ms":49}', "control.interval_ms"),
        ('{"op":"heartbeat","interval_ms":NaN}', "control.interval_ms"),
        ('{"op":"heartbeat","count":0}', "control.count"),
        ('{"op":"heartbeat","count":true}', "control.count"),
        ('{"op":"heartbeat","count":241}', "control.count"),
    ],
)
def test_bad_control_is_named(text: str, param: str) -> None:
    with pytest.raises(RequestError) as info:
        ControlRequest.from_json(text)
    assert info.value.param == param
    assert info.value.status == 400
