"""The responder: joining, order, one final response, clients that go, faults that stay apart."""

import threading
import time
from collections.abc import Iterator

import pytest

from shoal.backend.chunk import Chunk, join_chunks
from shoal.backend.responder import Responder
from shoal.scheduler.sequence import FinishReason

WAIT_S = 10.0


class RecordingReply:
    """Keeps what was sent. ``gate`` holds a send back; ``failures`` sends raise."""

    def __init__(self, failures: int = 0) -> None:
        self.chunks: list[Chunk] = []
        self.cancelled = False
        self.abandoned = False
        self.failures = failures
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.done = threading.Event()
        self.changed = threading.Condition()

    def send(self, chunk: Chunk) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no shared memory left")
        with self.changed:
            self.chunks.append(chunk)
            self.changed.notify_all()
        if chunk.final:
            self.done.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def abandon(self) -> None:
        self.abandoned = True
        self.done.set()

    def wait_chunks(self, count: int) -> list[Chunk]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.chunks) >= count, WAIT_S)
        return self.chunks


@pytest.fixture
def responder() -> Iterator[Responder]:
    responder = Responder(poll_s=0.005, keep_alive_s=0.05)
    yield responder
    responder.close(1)


def delta(text: str) -> Chunk:
    return Chunk(text=text, token_ids=tuple(text.encode()), num_input_tokens=3)


LAST = Chunk(text="!", token_ids=(33,), num_input_tokens=3, finish_reason=FinishReason.LENGTH)


def test_a_stream_gets_its_deltas_in_order(responder: Responder) -> None:
    reply = RecordingReply()
    stream = responder.open(reply, stream=True)
    for text in ("a", "b", "c"):
        stream.post(delta(text))
    stream.post(LAST)
    assert reply.done.wait(WAIT_S)
    assert join_chunks(reply.chunks) == join_chunks([delta("a"), delta("b"), delta("c"), LAST])
    assert [chunk.final for chunk in reply.chunks].count(True) == 1


def test_without_stream_all_comes_in_one_response(responder: Responder) -> None:
    reply = RecordingReply()
    whole = responder.open(reply, stream=False)
    for text in ("a", "b"):
        whole.post(delta(text))
    whole.post(LAST)
    assert reply.done.wait(WAIT_S)
    assert [chunk.text for chunk in reply.chunks] == ["ab!"]
    assert reply.chunks[0].num_new_tokens == 3


def test_deltas_that_queue_up_are_joined(responder: Responder) -> None:
    reply = RecordingReply()
    reply.gate.clear()
    stream = responder.open(reply, stream=True)
    stream.post(delta("a"))
    assert reply.entered.wait(WAIT_S)
    for _ in range(100):
        stream.post(delta("b"))
    stream.post(LAST)
    reply.gate.set()
    assert reply.done.wait(WAIT_S)
    assert [chunk.text for chunk in reply.chunks] == ["a", "b" * 100 + "!"]


def test_a_token_without_text_waits_for_text(responder: Responder) -> None:
    """Half a character, or a stop string's beginning: no empty delta goes out for it."""
    reply = RecordingReply()
    stream = responder.open(reply, stream=True)
    stream.post(Chunk(token_ids=(1,)))
    stream.post(Chunk(text="é", token_ids=(2,)))
    assert reply.wait_chunks(1)[0] == Chunk(text="é", token_ids=(1, 2))
    stream.post(LAST)


def test_every_token_goes_out_when_asked_for(responder: Responder) -> None:
    reply = RecordingReply()
    stream = responder.open(reply, stream=True, every_token=True)
    stream.post(Chunk(token_ids=(1,)))
    assert reply.wait_chunks(1)[0].token_ids == (1,)
    stream.post(LAST)


def test_nothing_follows_the_final_chunk(responder: Responder) -> None:
    reply = RecordingReply()
    stream = responder.open(reply, stream=True)
    stream.post(LAST)
    stream.post(delta("late"))
    assert reply.done.wait(WAIT_S)
    stream.post(delta("later"))
    other = RecordingReply()
    responder.open(other, stream=True).post(LAST)
    assert other.done.wait(WAIT_S)
    assert reply.chunks == [LAST]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_is_seen_before_its_first_token(
    responder: Responder, stream: bool
) -> None:
    reply = RecordingReply()
    seen = threading.Semaphore(0)
    opened = responder.open(reply, stream=stream)
    responder.watch(opened, seen.release)
    reply.cancelled = True
    assert seen.acquire(timeout=WAIT_S)
    time.sleep(0.05)  # some more polls: told once is enough
    assert not seen.acquire(blocking=False)
    opened.post(Chunk(finish_reason=FinishReason.CANCELLED))
    assert reply.done.wait(WAIT_S)


def test_silence_is_broken_for_streams_only(responder: Responder) -> None:
    quiet, whole = RecordingReply(), RecordingReply()
    streamed = responder.open(quiet, stream=True)
    joined = responder.open(whole, stream=False)
    for opened in (streamed, joined):
        responder.watch(opened, lambda: None)
    assert quiet.wait_chunks(2)[0] == Chunk()
    assert whole.chunks == []
    for opened in (streamed, joined):
        opened.post(LAST)


def test_a_failing_send_ends_that_request_and_no_other(responder: Responder) -> None:
    broken, well = RecordingReply(failures=1), RecordingReply()
    cancelled = threading.Event()
    opened = responder.open(broken, stream=True)
    responder.watch(opened, cancelled.set)
    opened.post(delta("a"))
    assert broken.done.wait(WAIT_S)
    assert cancelled.is_set()
    assert broken.chunks[-1].error is not None
    assert broken.chunks[-1].error.status == 500
    responder.open(well, stream=True).post(LAST)
    assert well.done.wait(WAIT_S)


def test_when_not_even_an_error_can_be_sent_the_request_is_closed(responder: Responder) -> None:
    reply = RecordingReply(failures=2)
    responder.open(reply, stream=True).post(delta("a"))
    assert reply.done.wait(WAIT_S)
    assert reply.abandoned
    deadline = time.monotonic() + WAIT_S
    while responder.num_open and time.monotonic() < deadline:
        time.sleep(0.001)
    assert responder.num_open == 0


def test_close_sends_what_is_queued_and_closes_what_is_open() -> None:
    responder = Responder()
    finished, forgotten = RecordingReply(), RecordingReply()
    stream = responder.open(finished, stream=True)
    responder.open(forgotten, stream=True)
    stream.post(LAST)
    responder.close(0.2)
    assert finished.chunks == [LAST]
    assert forgotten.abandoned
