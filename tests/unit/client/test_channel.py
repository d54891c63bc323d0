"""The client's side of a channel, against a server that speaks the real gRPC protocol."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fake_pieces import Piece, Request, endless
from fake_triton import MODEL, FakeModel, FakeTriton

from shoal.backend.channel_messages import ACK_EVERY, ChannelDelta
from shoal.client import channel_stream
from shoal.client.channel import ModelChannel
from shoal.client.channel_stream import ChannelStream
from shoal.client.errors import ShoalError, unavailable
from shoal.client.triton_stream import TritonStream

WAIT_S = 20.0


@pytest.fixture
async def channel(triton: TritonStream) -> AsyncIterator[ModelChannel]:
    opened = triton.channel(MODEL)
    yield opened
    await opened.close()


def ask(channel: ModelChannel, text: str = "a b c", **sampling: Any) -> ChannelStream:
    return channel.generate(text_input=text, sampling=sampling)


async def endless_streams(
    channel: ModelChannel, fake: FakeTriton, count: int = 1
) -> list[ChannelStream]:
    """Requests that run, and go on until they are cancelled."""
    fake.model.script = endless
    streams = [ask(channel) for _ in range(count)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    return streams


async def read(stream: ChannelStream) -> str:
    text = ""
    finishes = 0
    async for delta in stream:
        text += delta.text
        finishes += delta.finish_reason is not None
    assert finishes == 1
    return text


async def failure(stream: ChannelStream) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        async for _ in stream:
            pass
    return caught.value


async def failed(streams: list[ChannelStream]) -> list[int]:
    """The status of each one's end."""
    return [error.status for error in await asyncio.gather(*map(failure, streams))]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_one_stream_carries_many_requests(channel: ModelChannel, fake: FakeTriton) -> None:
    texts = await asyncio.gather(*(read(ask(channel, max_tokens=n)) for n in range(1, 65)))
    assert texts == ["".join(f"w{i} " for i in range(n)) for n in range(1, 65)]
    assert len(fake.model.channels) == 1
    assert channel.num_open == 0


async def test_requests_that_wait_travel_together(channel: ModelChannel, fake: FakeTriton) -> None:
    await asyncio.gather(*(read(ask(channel, max_tokens=1)) for _ in range(64)))
    assert len(fake.model.requests) == 64
    assert fake.model.num_orders <= 4 + 64 // ACK_EVERY


async def test_what_the_backend_receives(channel: ModelChannel, fake: FakeTriton) -> None:
    messages = json.dumps([{"role": "user", "content": "grüß 👋"}])
    stream = channel.generate(
        messages=messages,
        sampling={"max_tokens": 2, "stop": ["\n"]},
        stream=False,
        return_logprobs=True,
        parameters={"x-shoal-tenant": "t"},
        request_id="r-1",
    )
    deltas = [delta async for delta in stream]
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("w0 w1 ", "length")]
    request = fake.model.requests[0]
    assert request.inputs["messages"] == messages
    assert request.sampling == {"max_tokens": 2, "stop": ["\n"]}
    assert (request.id, request.parameters) == ("r-1", {"x-shoal-tenant": "t"})
    await read(channel.generate(input_ids=[1, 2, 3], sampling={"max_tokens": 1}))
    assert fake.model.requests[1].inputs["input_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    "arguments",
    [
        {"text_input": "\ud800"},
        {"input_ids": [1.5]},
        {"input_ids": [2**70]},
        {"text_input": "a", "sampling": {"temperature": float("nan")}},
    ],
)
async def test_what_cannot_be_sent_is_refused_before_it_is(
    channel: ModelChannel, fake: FakeTriton, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ShoalError) as caught:
        channel.generate(**arguments)
    assert caught.value.status == 400
    assert channel.num_open == 0
    assert await read(ask(channel))


async def test_closing_a_stream_cancels_its_request_alone(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    fake.model.script = endless
    first, second = ask(channel), ask(channel)
    async with first:
        assert (await anext(first)).text == "x"
    await until(lambda: fake.model.requests[0].cancelled.is_set())
    assert (await anext(second)).text.startswith("x")
    assert not fake.model.requests[1].cancelled.is_set()
    await second.aclose()
    await until(lambda: fake.model.requests[1].cancelled.is_set())


async def test_a_request_that_was_not_sent_yet_is_never_sent(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    await ask(channel).aclose()
    await read(ask(channel, max_tokens=1))
    assert len(fake.model.requests) == 1


async def test_closing_the_channel_cancels_all(channel: ModelChannel, fake: FakeTriton) -> None:
    streams = await endless_streams(channel, fake, 5)
    await channel.close()
    await until(lambda: all(request.cancelled.is_set() for request in fake.model.requests))
    assert {(await failure(stream)).status for stream in streams} == {503}


async def test_an_error_ends_its_own_request(channel: ModelChannel, fake: FakeTriton) -> None:
    def script(request: Request) -> Iterator[Piece]:
        if "bad" in request.inputs["text_input"]:
            yield Piece(error={"message": "no", "status": 429, "retry_after_ms": 70})
            return
        yield Piece("ok", finish_reason="stop")

    fake.model.script = script
    bad, good = ask(channel, "bad"), ask(channel, "good")
    error = await failure(bad)
    assert (error.status, error.message, error.retry_after_ms) == (429, "no", 70)
    assert error.type == "rate_limit_error"
    assert await read(good) == "ok"


async def test_requests_of_an_unknown_channel_go_again(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    """As when the server has begun to send requests to another version of the model."""
    fake.model.script = slow_words
    running = ask(channel, max_tokens=40)
    assert (await anext(running)).text == "w0 "
    former = dict(fake.model.channels)
    fake.model.channels.clear()
    later = await asyncio.gather(*(read(ask(channel, max_tokens=3)) for _ in range(10)))
    assert later == ["w0 w1 w2 "] * 10
    assert (await read(running)).endswith("w39 ")  # it goes on where it was taken
    assert len(fake.model.channels) == 1
    assert not former.keys() & fake.model.channels.keys()


async def test_a_submission_tells_what_it_waited_before_it_was_sent(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    fake.model.script = slow_words
    running = ask(channel, max_tokens=40)
    await anext(running)
    (former,) = fake.model.channels.values()
    fake.model.channels.clear()  # the next one goes twice
    late = ask(channel, max_tokens=1)
    late._begun_at -= 3.0
    assert await read(late) == "w0 "
    (opened,) = fake.model.channels.values()
    assert opened.waited_s[late.ref] >= 3.0
    assert former.waited_s[running.ref] < 3.0
    assert await read(running)


def slow_words(request: Request) -> Iterator[Piece]:
    count = request.sampling["max_tokens"]
    for index in range(count):
        finish = "length" if index == count - 1 else None
        yield Piece(f"w{index} ", delay_s=0.005, finish_reason=finish)


async def test_of_a_version_that_is_unloaded_what_nobody_waits_for_is_cancelled(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    """It takes no orders, so a request goes on beside one whose client is still there."""
    one, two = await endless_streams(channel, fake, 2)
    fake.model.loaded = False
    assert (await failure(ask(channel))).status in (404, 503)
    await one.aclose()
    for _ in range(100):
        await anext(two)
    await two.aclose()
    await until(lambda: all(request.cancelled.is_set() for request in fake.model.requests))
    fake.model.loaded = True
    fake.model.script = slow_words
    assert await read(ask(channel, max_tokens=2)) == "w0 w1 "


async def test_hanging_up_on_an_old_version_leaves_the_new_one_alone(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    (old,) = await endless_streams(channel, fake)
    fake.model.channels.clear()  # another version answers, which knows of none
    fake.model.script = slow_words
    new = ask(channel, max_tokens=200)
    await anext(new)
    await old.aclose()
    await until(fake.model.requests[0].cancelled.is_set)
    assert (await read(new)).endswith("w199 ")


async def test_a_process_that_is_silent_is_given_up(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    fake.model.script = endless
    stream = ask(channel)
    for _ in range(20):
        await anext(stream)
        channel.fail_silent(3)
    fake.model.stub_alive = False
    await asyncio.sleep(0.1)
    for _ in range(4):
        channel.fail_silent(3)
    assert (await failure(stream)).status == 503
    assert channel.num_open == 0


async def test_an_idle_channel_is_opened_again(channel: ModelChannel, fake: FakeTriton) -> None:
    for _ in range(3):
        assert await read(ask(channel, max_tokens=1)) == "w0 "
        for opened in list(fake.model.channels.values()):
            fake.model.channels.clear()
            opened.end()
    assert len(fake.model.requests) == 3


async def test_a_lost_channel_fails_its_requests_and_the_next_works(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    streams = await endless_streams(channel, fake, 3)
    fake.model.channels.popitem()[1].carrier.send([], True)  # no reason given
    assert await failed(streams) == [503] * 3
    fake.model.script = slow_words
    assert await read(ask(channel, max_tokens=1)) == "w0 "


async def test_a_dead_stub_refuses_new_requests_and_a_reset_ends_the_others(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    (running,) = await endless_streams(channel, fake)
    fake.model.stub_alive = False
    error = await failure(ask(channel))
    assert (error.status, error.code) == (503, "service_unavailable")
    assert channel.num_open == 1
    channel.reset(unavailable("it stopped answering"))
    assert (await failure(running)).message == "it stopped answering"
    fake.model.stub_alive = True
    fake.model.channels.clear()
    fake.model.script = slow_words
    assert await read(ask(channel, max_tokens=2)) == "w0 w1 "


async def test_a_server_that_ends_fails_all_and_is_found_again(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    streams = await endless_streams(channel, fake, 3)
    fake.stop()
    assert await failed(streams) == [503] * 3
    fake.models[MODEL] = FakeModel()
    fake.start()
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(ShoalError):
                text = await read(ask(channel, max_tokens=1))
                break
            await asyncio.sleep(0.05)
    assert text == "w0 "


async def test_an_unknown_model_is_said_to_be(triton: TritonStream) -> None:
    channel = triton.channel("nobody")
    assert (await failure(ask(channel))).status == 404
    await channel.close()


async def test_what_nobody_reads_is_joined_and_holds_up_no_other(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    fake.model.script = slow_words
    unread = ask(channel, max_tokens=60)
    assert await read(ask(channel, max_tokens=60))
    await until(lambda: fake.model.requests[0].finished.is_set() and channel.num_open == 0)
    deltas = [delta async for delta in unread]
    assert len(deltas) <= channel_stream.JOIN_ABOVE + 2
    assert "".join(delta.text for delta in deltas) == "".join(f"w{i} " for i in range(60))
    assert sum(delta.num_output_tokens for delta in deltas) == 60


async def test_a_reader_too_far_behind_is_cut_off(
    channel: ModelChannel, fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_stream, "MAX_WAITING_BYTES", 50)
    fake.model.script = endless
    stream = ask(channel)
    await until(lambda: any(request.cancelled.is_set() for request in fake.model.requests))
    assert (await failure(stream)).code == "too_slow"


async def test_what_was_read_is_acknowledged(channel: ModelChannel, fake: FakeTriton) -> None:
    fake.model.script = slow_words
    await read(ask(channel, max_tokens=50))
    opened = next(iter(fake.model.channels.values()))
    await until(lambda: opened.num_read >= 50 - ACK_EVERY)
    assert fake.model.num_orders <= 1 + 50 // ACK_EVERY


async def test_two_clients_of_a_server_are_not_mixed_up(fake: FakeTriton) -> None:
    """Each has requests of the same numbers."""
    async with TritonStream(fake.url) as one, TritonStream(fake.url) as two:
        channels = [one.channel(MODEL), two.channel(MODEL)]
        fake.model.script = named
        streams = [
            ask(channel, name, max_tokens=20)
            for _, (channel, name) in itertools.product(range(8), zip(channels, "ab", strict=True))
        ]
        texts = await asyncio.gather(*(read(stream) for stream in streams))
        assert texts == ["a" * 20, "b" * 20] * 8
        assert len(fake.model.channels) == 2
        for channel in channels:
            await channel.close()


def named(request: Request) -> Iterator[Piece]:
    for index in range(20):
        finish = "length" if index == 19 else None
        yield Piece(request.inputs["text_input"], delay_s=0.002, finish_reason=finish)


async def test_several_choices_end_each_with_a_finish(channel: ModelChannel) -> None:
    stream = ask(channel, max_tokens=3, n=3)
    texts = ["", "", ""]
    finishes = 0
    async for delta in stream:
        texts[delta.index] += delta.text
        finishes += delta.finish_reason is not None
    assert finishes == 3
    assert texts == ["".join(f"c{i}w{step} " for step in range(3 + i)) for i in range(3)]


async def test_a_listener_and_the_reader_get_all_between_them_in_order() -> None:
    stream = ChannelStream(lambda _: None, 1, b"", num_choices=1)
    texts: list[str] = []
    heard: list[str] = []

    def listen(delta: ChannelDelta) -> bool:
        if delta.text.endswith("!") or delta.finish_reason is not None:
            return False
        heard.append(delta.text)
        texts.append(delta.text)
        return True

    async def read_all() -> None:
        async for delta in stream:
            await asyncio.sleep(0)  # what comes now has to wait its turn
            texts.append(delta.text)

    stream.listen(listen)
    reader = asyncio.create_task(read_all())
    told = ["a", "b!", "c", "d", "e", "f!", "g", "h"]
    for number, text in enumerate(told):
        for _ in range(4 * (number % 4 == 0)):
            await asyncio.sleep(0)
        stream.take(ChannelDelta(1, text, finish_reason="stop" if text == "h" else None))
    await reader
    assert texts == told
    assert heard == ["a", "e"]


async def test_a_listener_that_fails_ends_its_stream_alone(
    channel: ModelChannel, fake: FakeTriton
) -> None:
    def broken(delta: ChannelDelta) -> bool:
        raise RuntimeError

    bad, good = ask(channel, max_tokens=8), ask(channel, max_tokens=8)
    bad.listen(broken)
    error, text = await asyncio.gather(failure(bad), read(good))
    assert error.status == 500
    assert text == "".join(f"w{i} " for i in range(8))
