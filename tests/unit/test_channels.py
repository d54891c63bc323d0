"""The backend's side of channels: many requests answered together, each as if it were alone."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import fake_pb_utils
import msgspec
import numpy as np
import pytest
from scripted_worker import ScriptedWorkers, WorkerScript, scripted_text
from service_runs import aborted, make_service, until

pb_utils = fake_pb_utils.install()

from shoal.backend import channels as channels_module  # noqa: E402
from shoal.backend import codec  # noqa: E402
from shoal.backend.channel_messages import (  # noqa: E402
    ChannelDelta,
    ChannelOrders,
    ReadNews,
    Submission,
)
from shoal.backend.channels import Channels  # noqa: E402
from shoal.backend.responder import Responder  # noqa: E402

WAIT_S = 20.0


class Backend:
    """A service behind channels; tells what a client process would see."""

    def __init__(self, workers: ScriptedWorkers) -> None:
        self.workers = workers
        self.responder = Responder(poll_s=0.005, keep_alive_s=30)
        self.service = make_service(workers)
        self.service.start(turn=self.responder.holding)
        self.channels = Channels(self.responder, self.service)

    def send(self, channel: str, *submissions: Submission | bytes, **orders: Any) -> Any:
        """One message; returns its response sender."""
        raws = [
            msgspec.Raw(item if isinstance(item, bytes) else msgspec.msgpack.encode(item))
            for item in submissions
        ]
        encoded = msgspec.msgpack.encode(ChannelOrders(channel, submissions=raws, **orders))
        tensor = pb_utils.Tensor("channel", np.frombuffer(encoded, np.uint8))
        request = pb_utils.InferenceRequest([tensor])
        decoded = codec.read_channel(request)
        assert decoded is not None
        self.channels.take(decoded, codec.TritonReply(request))
        request.sender.read = lambda: self.send(channel, num_read=len(request.sender.responses))
        return request.sender

    def close(self) -> None:
        self.service.stop(0)
        self.responder.close(2)


@pytest.fixture
def backend() -> Iterator[Backend]:
    running = Backend(ScriptedWorkers(WorkerScript(max_num_seqs=64)))
    yield running
    running.close()
    assert all(worker.closed for worker in running.workers.spawned)


def ask(ref: int, text: str = "hello", max_tokens: int = 4, **fields: Any) -> Submission:
    sampling = msgspec.json.encode({"max_tokens": max_tokens})
    return Submission(ref, text.encode(), sampling=sampling, **fields)


def news_of(sender: Any) -> list[ReadNews]:
    tensors = [response.output_tensors()[0].as_numpy() for response in list(sender.responses)]
    return [msgspec.msgpack.decode(array.tobytes(), type=ReadNews) for array in tensors]


def deltas_of(sender: Any, ref: int) -> list[ChannelDelta]:
    return [delta for news in news_of(sender) for delta in news.deltas if delta.ref == ref]


def wait_finished(sender: Any, *refs: int) -> dict[int, list[ChannelDelta]]:
    """What each request was told, once it has finished; exactly one finish, and it comes last.
    Reads on meanwhile."""

    def have_finished() -> bool:
        if not sender.closed:
            sender.read()
        return all(any(d.finish_reason for d in deltas_of(sender, ref)) for ref in refs)

    until(have_finished)
    told = {ref: deltas_of(sender, ref) for ref in refs}
    for deltas in told.values():
        finishes = [delta.finish_reason for delta in deltas]
        assert finishes[:-1] == [None] * (len(deltas) - 1)
        assert finishes[-1] is not None
    return told


def text_of(deltas: list[ChannelDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_requests_of_several_messages_are_answered_over_the_one_that_opened(
    backend: Backend,
) -> None:
    channel = backend.send("a", ask(1, max_tokens=9), ask(2, "hi", 5), opens=True)
    order = backend.send("a", ask(3, "abc", 3, stream=False))
    assert order.closed
    assert order.responses == []
    told = wait_finished(channel, 1, 2, 3)
    assert [text_of(told[ref]) for ref in (1, 2, 3)] == [
        scripted_text(5, 9),
        scripted_text(2, 5),
        scripted_text(3, 3),
    ]
    assert len(told[3]) == 1
    assert (told[3][0].num_input_tokens, told[3][0].num_output_tokens) == (3, 3)
    assert sum(delta.num_output_tokens for delta in told[1]) == 9
    assert not channel.closed


def test_what_a_step_brings_comes_in_one_response(backend: Backend) -> None:
    backend.workers.running.clear()
    channel = backend.send("a", *(ask(ref, max_tokens=6) for ref in range(1, 21)), opens=True)
    until(lambda: len(backend.workers.last.sequences) == 20)
    backend.workers.running.set()
    wait_finished(channel, *range(1, 21))
    assert len(news_of(channel)) <= 6 + 1
    assert max(len(news.deltas) for news in news_of(channel)) == 20


def test_an_order_for_a_channel_that_is_not_open_takes_nothing(backend: Backend) -> None:
    order = backend.send("nobody", ask(1))
    assert order.wait_closed()
    assert [news.is_unknown for news in news_of(order)] == [True]
    assert backend.service.status()["num_live"] == 0


def test_a_cancelled_request_ends_alone(backend: Backend) -> None:
    channel = backend.send("a", ask(1, max_tokens=400), ask(2, max_tokens=30), opens=True)
    until(lambda: len(backend.workers.last.sequences) == 2)
    assert backend.send("a", cancellations=[1, 77]).closed
    told = wait_finished(channel, 1, 2)
    assert told[1][-1].finish_reason == "cancelled"
    assert text_of(told[2]) == scripted_text(5, 30)
    assert 1 in aborted(backend.workers.last)


def test_all_requests_of_a_client_that_has_gone_are_ended_and_no_others(
    backend: Backend,
) -> None:
    mine = backend.send("a", *(ask(ref, max_tokens=450) for ref in (1, 2, 3)), opens=True)
    other = backend.send("b", ask(1, "abcd", 40), opens=True)
    until(lambda: len(backend.workers.last.sequences) == 4)
    mine.cancel()
    mine.wait_closed()
    told = wait_finished(other, 1)
    assert text_of(told[1]) == scripted_text(4, 40)
    until(lambda: backend.service.status()["num_live"] == 0)
    assert len(aborted(backend.workers.last)) >= 3
    assert [news.is_unknown for news in news_of(backend.send("a", ask(9)))] == [True]


def test_an_idle_channel_ends_and_can_be_opened_again(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_module, "IDLE_S", 0.05)
    channel = backend.send("a", ask(1), opens=True)
    wait_finished(channel, 1)
    channel.wait_closed()
    assert news_of(channel)[-1].is_idle
    again = backend.send("a", ask(2), opens=True)
    assert text_of(wait_finished(again, 2)[2]) == scripted_text(5, 4)


def test_a_client_that_reads_nothing_gets_joined_deltas_and_no_more_responses(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = 8  # far fewer than tokens: a busy machine joins some before the window is full
    monkeypatch.setattr(channels_module, "WINDOW", window)
    monkeypatch.setattr(channels_module, "UNREAD_PACE_S", 1e9)
    channel = backend.send("a", ask(1, max_tokens=200), opens=True)
    until(lambda: len(news_of(channel)) == window)
    until(lambda: backend.service.status()["num_live"] == 0)
    assert len(news_of(channel)) == window
    backend.send("a", num_read=1)
    told = wait_finished(channel, 1)
    assert len(news_of(channel)) == window + 1
    assert text_of(told[1]) == scripted_text(5, 200)


def test_a_client_whose_orders_do_not_arrive_gets_all_the_same(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its version is being unloaded, and the server takes no more for it."""
    monkeypatch.setattr(channels_module, "UNREAD_PACE_S", 0.02)
    channel = backend.send("a", ask(1, max_tokens=200), opens=True)
    until(lambda: any(delta.finish_reason for delta in deltas_of(channel, 1)))
    assert text_of(deltas_of(channel, 1)) == scripted_text(5, 200)


def test_a_channel_with_requests_is_never_silent(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_module, "PULSE_S", 0.02)
    backend.workers.running.clear()
    channel = backend.send("a", ask(1, stream=False), opens=True)
    until(lambda: len(news_of(channel)) >= 3)
    assert not any(news.deltas for news in news_of(channel))
    backend.workers.running.set()
    assert text_of(wait_finished(channel, 1)[1]) == scripted_text(5, 4)
    count = len(news_of(channel))
    time.sleep(0.2)
    assert len(news_of(channel)) == count


def test_refusals_and_unreadable_submissions_are_answered_to_their_own_request(
    backend: Backend,
) -> None:
    broken = msgspec.msgpack.encode({"ref": 2, "text_input": 5})
    channel = backend.send("a", ask(1, max_tokens=-4), broken, ask(3), opens=True)
    told = wait_finished(channel, 1, 2, 3)
    errors = [told[1][0].error, told[2][0].error]
    assert [error.status for error in errors if error] == [400, 400]
    assert errors[0] is not None
    assert errors[0].param == "max_tokens"
    assert text_of(told[3]) == scripted_text(5, 4)


@pytest.mark.parametrize(
    ("waited_ms", "timed_out"),
    [([], []), ([5000], [1]), ([5000, -7, 10], [1]), ([0, 10**15, 0, 9], [2])],
)
def test_a_timeout_counts_what_a_submission_waited_with_its_client(
    backend: Backend, waited_ms: list[int], timed_out: list[int]
) -> None:
    asked = [ask(ref, parameters={"timeout": 4000}) for ref in (1, 2, 3)]
    channel = backend.send("a", *asked, opens=True, waited_ms=waited_ms)
    told = wait_finished(channel, 1, 2, 3)
    codes = {ref: deltas[-1].error.code for ref, deltas in told.items() if deltas[-1].error}
    assert codes == dict.fromkeys(timed_out, "timeout")


def test_several_choices_and_logprobs(backend: Backend) -> None:
    sampling = msgspec.json.encode({"max_tokens": 3, "n": 2, "logprobs": 1})
    request = Submission(1, b"hello", sampling=sampling, return_logprobs=True)
    channel = backend.send("a", request, opens=True)
    until(lambda: sum(bool(d.finish_reason) for d in deltas_of(channel, 1)) == 2)
    deltas = deltas_of(channel, 1)
    for index in (0, 1):
        mine = [delta for delta in deltas if delta.index == index]
        assert text_of(mine) == scripted_text(5, 3)
        entries = [entry for d in mine for entry in msgspec.json.decode(d.logprobs or "[]")]
        assert len(entries) == 3


def test_a_worker_that_dies_is_replayed_within_the_channel() -> None:
    dies = WorkerScript(max_num_seqs=64, die_on=lambda worker: worker.num_steps == 7)
    running = Backend(ScriptedWorkers(dies, WorkerScript(max_num_seqs=64)))
    try:
        channel = running.send("a", *(ask(ref, max_tokens=20) for ref in (1, 2)), opens=True)
        told = wait_finished(channel, 1, 2)
        assert [text_of(told[ref]) for ref in (1, 2)] == [scripted_text(5, 20)] * 2
        assert len(running.workers.spawned) == 2
    finally:
        running.close()


def test_stopping_answers_all_and_ends_the_channel() -> None:
    running = Backend(ScriptedWorkers(WorkerScript(max_num_seqs=64)))
    running.workers.running.clear()
    channel = running.send("a", ask(1), ask(2), opens=True)
    until(lambda: len(running.workers.last.sequences) == 2)
    running.close()
    told = wait_finished(channel, 1, 2)
    errors = [told[ref][-1].error for ref in (1, 2)]
    assert [error.code for error in errors if error] == ["shutting_down"] * 2
    assert channel.closed


def test_a_channel_that_cannot_send_ends_its_requests(backend: Backend) -> None:
    backend.workers.running.clear()
    channel = backend.send("a", ask(1, max_tokens=400), opens=True)
    channel.fail_sends = 1
    backend.workers.running.set()
    channel.wait_closed()
    until(lambda: backend.service.status()["num_live"] == 0)


def test_many_clients_at_once_are_never_mixed_up(backend: Backend) -> None:
    """Threads stand for client processes; their requests come, go and are cancelled."""
    failures: list[str] = []

    def client(name: str, length: int) -> None:
        channel = backend.send(name, ask(1, "x" * length, 12), opens=True)
        for ref in range(2, 12):
            backend.send(name, ask(ref, "x" * length, 12), cancellations=[ref - 3])
        deadline = time.monotonic() + WAIT_S
        refs = range(1, 12)
        while not all(any(d.finish_reason for d in deltas_of(channel, r)) for r in refs):
            backend.send(name, num_read=len(channel.responses))
            if time.monotonic() > deadline:
                failures.append(f"{name}: not finished")
                return
            time.sleep(0.005)
        for ref in refs:
            deltas = deltas_of(channel, ref)
            whole = scripted_text(length, 12)
            cut = deltas[-1].finish_reason == "cancelled"
            if not whole.startswith(text_of(deltas)) or (not cut and text_of(deltas) != whole):
                failures.append(f"{name}/{ref}: {text_of(deltas)}")

    threads = [
        threading.Thread(target=client, args=(f"c{length}", length)) for length in range(3, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S + 5)
    assert failures == []
