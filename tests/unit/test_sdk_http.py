"""The SDK over HTTP gives what it gives over gRPC; retries over both."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pieces import Piece, Request, echo_script, endless
from fake_triton import MODEL, FakeModel, FakeTriton
from shim_thread import ShimThread

from shoal.client import http_transport
from shoal.client.cli.keys import add_key
from shoal.client.errors import ShoalError
from shoal.client.event_stream import EventReader
from shoal.client.retries import NO_RETRIES, RetryPolicy
from shoal.client.sdk import AsyncClient, Client
from shoal.client.types import Completion, ModelInfo, ToolCall, Usage

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def triton() -> Iterator[FakeTriton]:
    with FakeTriton() as server:
        yield server


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    return path, add_key(path, "sdk", {})


@pytest.fixture(scope="module")
def shim(triton: FakeTriton, key: tuple[Path, str]) -> Iterator[ShimThread]:
    with ShimThread(triton.url, keys_file=key[0]) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def model(triton: FakeTriton) -> Iterator[FakeModel]:
    yield triton.model
    triton.model.script = echo_script
    triton.model.state = "ready"
    triton.model.requests.clear()


@pytest.fixture(params=["http", "grpc"])
def client(
    request: pytest.FixtureRequest,
    shim: ShimThread,
    triton: FakeTriton,
    key: tuple[Path, str],
    model: FakeModel,
) -> Iterator[Client]:
    is_http = request.param == "http"
    api_key = key[1] if is_http else None
    with Client(shim.url if is_http else triton.url, api_key=api_key) as made:
        yield made


@pytest.fixture
def http(shim: ShimThread, key: tuple[Path, str], model: FakeModel) -> Iterator[Client]:
    with Client(f"{shim.url}/v1/", model=MODEL, api_key=key[1], retries=NO_RETRIES) as made:
        yield made


def silent(request: Request) -> Iterator[Piece]:
    yield Piece("never", delay_s=3600)


def refusing(num_times: int, status: int = 429, retry_after_ms: int | None = 20) -> Any:
    """A script that refuses so many requests, and then answers."""
    left = iter(range(num_times))

    def script(request: Request) -> Iterator[Piece]:
        if next(left, None) is not None:
            error = {"message": "busy", "status": status, "retry_after_ms": retry_after_ms}
            yield Piece(error=error)
        else:
            yield from echo_script(request)

    return script


# The same over both


@pytest.mark.parametrize("prompt", ["a b", CHAT, [1, 2, 3]])
def test_whole_and_streamed_are_equal(client: Client, model: FakeModel, prompt: Any) -> None:
    model.num_cached_tokens = 1
    whole = client.generate(prompt, max_tokens=3)
    assert (whole.text, whole.finish_reason) == ("w0 w1 w2 ", "length")
    assert whole.usage.completion_tokens == 3
    assert whole.usage.prompt_tokens > 0
    assert whole.usage.cached_tokens == 1
    with client.stream(prompt, max_tokens=3) as stream:
        deltas = list(stream)
    # The fake server counts the ids of each response anew.
    assert replace(stream.completion(), token_ids=()) == replace(whole, token_ids=())
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [bool(delta.finish_reason) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    model.num_cached_tokens = 0


def test_several_choices(client: Client) -> None:
    answer = client.generate("a b", max_tokens=2, n=2)
    assert (answer.text, answer.others[0].text) == ("c0w0 c0w1 ", "c1w0 c1w1 c1w2 ")
    with client.stream("a b", max_tokens=2, n=2) as stream:
        assert {delta.index for delta in stream} == {0, 1}
    assert stream.usage == Usage(2, 5)


def test_calls_of_tools(client: Client, model: FakeModel) -> None:
    first = {"index": 0, "id": "call_1", "name": "look", "arguments": ""}
    rest = [{"index": 0, "id": None, "name": None, "arguments": part} for part in ('{"a":', "1}")]
    model.script = lambda request: iter(
        [
            Piece(tool_calls=(first,)),
            Piece(tool_calls=(rest[0],)),
            Piece(tool_calls=(rest[1],)),
            Piece("", 0, "tool_calls"),
        ]
    )
    with client.stream(CHAT) as stream:
        for _ in stream:
            pass
    answer = stream.completion()
    assert answer.tool_calls == (ToolCall("call_1", "look", '{"a":1}'),)
    assert answer.finish_reason == "tool_calls"


def test_leaving_a_stream_cancels(client: Client, model: FakeModel) -> None:
    model.script = endless
    with client.stream("a") as stream:
        assert next(stream).text == "x"
    assert model.requests[0].cancelled.wait(10)
    assert list(stream) == []


def test_a_timeout_is_504(client: Client, model: FakeModel) -> None:
    model.script = endless
    with pytest.raises(ShoalError) as caught, client.stream("a", timeout_s=0.3) as stream:
        for _ in stream:
            pass
    assert (caught.value.status, caught.value.code) == (504, "timeout")
    assert model.requests[0].cancelled.wait(10)


def test_refusals_name_the_field(client: Client, model: FakeModel) -> None:
    model.script = lambda request: iter(
        [Piece(error={"message": "no", "status": 400, "param": "top_p", "code": "invalid_value"})]
    )
    for ask in (client.generate, lambda prompt: next(client.stream(prompt))):
        with pytest.raises(ShoalError) as caught:
            ask("a")
        error = caught.value
        assert (error.status, error.param, error.code) == (400, "top_p", "invalid_value")
    with pytest.raises(ShoalError, match="not empty"):
        client.generate([])


def test_busy_servers_are_asked_again(client: Client, model: FakeModel) -> None:
    for ask in (client.generate, lambda prompt: next(client.stream(prompt))):
        model.requests.clear()
        model.script = refusing(2)
        started = time.monotonic()
        assert ask("a").text.startswith("w0 ")
        assert len(model.requests) == 3
        assert time.monotonic() - started >= 0.04, "not before the time that was told"


def test_retries_are_bounded(client: Client, model: FakeModel) -> None:
    model.script = refusing(99)
    with pytest.raises(ShoalError) as caught:
        client.generate("a")
    assert (caught.value.status, caught.value.retry_after_ms) == (429, 20)
    assert len(model.requests) == 3
    for script, num_requests in (
        (refusing(99, retry_after_ms=60_000), 1),  # more than anybody wants to wait
        (refusing(99, status=400), 1),
        (refusing(99, status=500), 1),
    ):
        model.requests.clear()
        model.script = script
        with pytest.raises(ShoalError):
            client.generate("a")
        assert len(model.requests) == num_requests
    model.requests.clear()
    model.script = refusing(99, retry_after_ms=5_000)
    with pytest.raises(ShoalError):
        client.generate("a", timeout_s=1)
    assert len(model.requests) == 1, "a wait that the timeout does not allow is none"


def test_no_second_attempt_once_text_came_out(client: Client, model: FakeModel) -> None:
    model.script = lambda request: iter(
        [Piece("x"), Piece(error={"message": "lost", "status": 503, "retry_after_ms": 1})]
    )
    with client.stream("a") as stream:
        assert next(stream).text == "x"
        with pytest.raises(ShoalError, match="lost") as caught:
            next(stream)
    assert caught.value.status == 503
    assert len(model.requests) == 1


def test_models_and_ready(client: Client, model: FakeModel) -> None:
    (info,) = client.models()
    assert (info.name, info.ready) == (MODEL, True)
    assert client.ready()
    assert not client.ready("other")


# HTTP alone


def test_a_key_is_needed(shim: ShimThread, monkeypatch: pytest.MonkeyPatch, key: Any) -> None:
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    with Client(shim.url) as client, pytest.raises(ShoalError) as caught:
        client.models()
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    monkeypatch.setenv("SHOAL_API_KEY", key[1])
    with Client(shim.url) as client:
        assert client.models() == [ModelInfo(MODEL, "", True)]
    with pytest.raises(ShoalError, match="OpenAI endpoint"):
        Client("127.0.0.1:1", api_key="x")
    with pytest.raises(ShoalError, match="http://"):
        Client("ftp://x")


def test_text_with_odd_line_ends_stays_whole(http: Client, model: FakeModel) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\n\r g 😀"
    pieces = [Piece(character) for character in text]
    model.script = lambda request: iter([*pieces, Piece("", 0, "stop")])
    with http.stream("a") as stream:
        assert "".join(delta.text for delta in stream) == text
    model.script = lambda request: iter([*pieces, Piece("", 0, "stop")])
    assert http.generate(CHAT).text == text


def test_what_is_no_json_is_refused_here(http: Client) -> None:
    for value in (float("nan"), object()):
        with pytest.raises(ShoalError, match="JSON") as caught:
            http.generate("a", temperature=value)
        assert caught.value.status == 400


@pytest.mark.parametrize("over", ["http", "grpc"])
async def test_asynchronous(
    shim: ShimThread, triton: FakeTriton, key: tuple[Path, str], model: FakeModel, over: str
) -> None:
    url, api_key = (shim.url, key[1]) if over == "http" else (triton.url, None)
    async with AsyncClient(url, model=MODEL, api_key=api_key) as client:
        answers = await asyncio.gather(*(client.generate("a", max_tokens=2) for _ in range(20)))
        assert {answer.text for answer in answers} == {"w0 w1 "}
        assert replace(answers[0], token_ids=()) == Completion("w0 w1 ", "length", Usage(1, 2))
        async with client.stream("a", max_tokens=2) as stream:
            assert "".join([delta.text async for delta in stream]) == "w0 w1 "
        model.script = silent
        model.requests.clear()
        task = asyncio.create_task(client.generate("a"))
        while not model.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(model.requests[0].cancelled.wait, 10)


async def test_a_closed_client_says_so(shim: ShimThread) -> None:
    client = AsyncClient(shim.url, model=MODEL)
    await client.close()
    with pytest.raises(ShoalError, match="closed"):
        await client.generate("a")


class RawServer:
    """Answers every connection with the same bytes, and hangs up."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._answer = answer
        self.num_requests = 0

    def __enter__(self) -> "RawServer":
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                self.num_requests += 1
                connection.sendall(self._answer)


def raw(status: str, body: str, *headers: str) -> RawServer:
    head = "\r\n".join([f"HTTP/1.1 {status}", "connection: close", *headers])
    return RawServer(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())


@pytest.mark.parametrize(
    ("header", "wait_ms"),
    [
        ("retry-after: 7", 7000),
        ("retry-after: 0.5", 500),
        ("retry-after-ms: 30", 30),
        ("retry-after: soon", None),
        ("x-other: 1", None),
    ],
)
def test_answers_of_a_proxy(header: str, wait_ms: int | None) -> None:
    with raw("503 Busy", "<html>", header) as server, pytest.raises(ShoalError) as caught:
        Client(server.url, model="m", retries=NO_RETRIES).generate("a")
    assert caught.value.status == 503
    assert caught.value.retry_after_ms == wait_ms
    assert "503 Busy" in str(caught.value)


def test_retry_after_as_a_date() -> None:
    then = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    wait_ms = http_transport.retry_after_ms({"retry-after": then})
    assert wait_ms is not None
    assert 90_000 < wait_ms <= 100_000
    assert http_transport.retry_after_ms({"retry-after": then.replace("20", "19")}) == 0


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"choices":[{}],"usage":{}}', "nonsense"])
def test_another_kind_of_server(body: str) -> None:
    with raw("200 OK", body) as server, pytest.raises(ShoalError) as caught:
        Client(server.url, model="m", retries=NO_RETRIES).generate("a")
    assert caught.value.status == 502


def test_a_stream_cut_short() -> None:
    chunk = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    with raw("200 OK", f"data: {json.dumps(chunk)}\n\n") as server:
        stream = Client(server.url, model="m", retries=NO_RETRIES).stream("a")
        assert next(stream).text == "x"
        with pytest.raises(ShoalError, match="before it was finished"):
            next(stream)


def test_nobody_listens() -> None:
    policy = RetryPolicy(max_retries=1, first_wait_s=0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ShoalError, match="cannot be reached") as caught:
        Client(f"http://127.0.0.1:{port}", model="m", retries=policy).generate("a")
    assert caught.value.status == 503


# Parts


def test_event_reader_takes_any_pieces() -> None:
    stream = "data: a\r\n\r\n: note\ndata:b\ndata: c\n\nevent: x\nid: 1\n\ndata: d\u2028\r\rdata: e"
    raw_bytes = stream.encode()
    for size in (1, 2, 3, 5, len(raw_bytes)):
        reader = EventReader()
        pieces = [raw_bytes[i : i + size] for i in range(0, len(raw_bytes), size)]
        events = [event for piece in pieces for event in reader.feed(piece)]
        assert events == [b"a", b"b\nc", "d\u2028".encode()], size


def test_waits_grow_and_keep_their_bounds() -> None:
    policy = RetryPolicy(max_retries=9, first_wait_s=1, max_wait_s=4)
    busy = ShoalError("busy", 503)
    for attempt, longest in enumerate((1, 2, 4, 4)):
        waits = {policy.wait_s(busy, attempt) for _ in range(20)}
        assert all(wait is not None and longest / 2 <= wait <= longest for wait in waits)
        assert len(waits) > 10, "not all at once"
    told = policy.wait_s(ShoalError("busy", 429, retry_after_ms=3000), 0)
    assert told is not None
    assert 3 <= told <= 3.75
    assert policy.wait_s(ShoalError("busy", 429, retry_after_ms=5000), 0) is None
    assert policy.wait_s(busy, 9) is None
