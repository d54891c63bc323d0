"""The OpenAI shim over real HTTP: the official client, raw HTTP, and clients that leave."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_pieces import Piece, endless
from fake_triton import MODEL, FakeModel
from shim_calls import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    chat,
    completion,
    events,
    refusal,
    silent,
)
from shim_thread import ShimThread, wait_until

from shoal.client.openai import http_protocol


def test_chat_with_the_official_client(client: openai.OpenAI, model: FakeModel) -> None:
    model.num_cached_tokens = 1
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=2, temperature=0, seed=7, stop="z"
    )
    assert answer.choices[0].message.content == "w0 w1 "
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 2
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    (request,) = model.requests
    assert json.loads(request.inputs["messages"]) == MESSAGES
    assert request.inputs["stream"] is False
    assert request.sampling == {
        "max_completion_tokens": 2,
        "temperature": 0,
        "seed": 7,
        "stop": "z",
    }


def test_stream_with_the_official_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == "w0 w1 w2 "
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_official_client_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a b c", max_tokens=2)
    assert answer.choices[0].text == "w0 w1 "
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    stream = client.completions.create(model=MODEL, prompt=[1, 2], max_tokens=2, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "w0 w1 "
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]


def test_models_with_the_official_client(client: openai.OpenAI) -> None:
    assert [entry.id for entry in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "shoal"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_chat_stream_shape(http: httpx.Client) -> None:
    received = events(http, CHAT, chat(stream=True, max_tokens=2))
    assert received[-1] == "[DONE]"
    chunks = received[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
    assert deltas == [{"content": "w0 "}, {"content": "w1 "}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["length"]
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_empty_deltas_are_not_forwarded(http: httpx.Client, model: FakeModel) -> None:
    pieces = [Piece("", 0), Piece("a"), Piece("", 0), Piece("", 1, "stop")]
    model.script = lambda request: iter(pieces)
    received = events(http, CHAT, chat(stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in received[1:-1]] == [{"content": "a"}, {}]
    received = events(http, COMPLETIONS, completion(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in received[:-1]] == ["a", ""]
    assert received[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_only_in_one_last_chunk(http: httpx.Client, path: str) -> None:
    make = chat if path == CHAT else completion
    body = make(stream=True, max_tokens=3, stream_options={"include_usage": True})
    chunks = events(http, path, body)[:-1]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_in_every_chunk_where_it_is_wished(http: httpx.Client, path: str) -> None:
    make = chat if path == CHAT else completion
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http, path, make(stream=True, max_tokens=3, stream_options=options))[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [3, 3]
    assert chunks[-2]["usage"] == chunks[-1]["usage"]
    alone = make(stream=True, stream_options={"continuous_usage_stats": True})
    error = http.post(path, json=alone).json()["error"]
    assert error["param"] == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_asked(http: httpx.Client, options: Any) -> None:
    chunks = events(http, CHAT, chat(stream=True, stream_options=options))[:-1]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [True, False])
def test_refusal_of_the_backend_has_its_own_status(
    http: httpx.Client, model: FakeModel, stream: bool
) -> None:
    full = {"message": "full", "status": 429, "code": "queue_full", "retry_after_ms": 2300}
    model.script = lambda request: iter([Piece(error=full)])
    response = http.post(CHAT, json=chat(stream=stream))
    error = refusal(response, 429, None)
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert response.headers["retry-after"] == "3"
    assert response.headers["retry-after-ms"] == "2300"
    long = {"message": "long", "status": 400, "code": "context_length_exceeded"}
    model.script = lambda request: iter([Piece(error=long)])
    error = refusal(http.post(CHAT, json=chat(stream=stream)), 400, None)
    assert error["code"] == "context_length_exceeded"


def test_beats_that_tell_of_a_full_queue_shut_the_door(
    http: httpx.Client, model: FakeModel
) -> None:
    def status() -> int:
        return http.post(CHAT, json=chat()).status_code

    closed = {"is_closed": True, "places": 0, "max_queued_requests": 16}
    model.queue = closed | {"interval_ms": 1e6, "promised_ms": 5000.0}
    wait_until(lambda: status() == 429, "still open")
    model.requests.clear()
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion(stream=True))):
        response = http.post(path, json=body)
        error = refusal(response, 429, None)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert int(response.headers["retry-after-ms"]) > 5000
        assert response.headers["x-request-id"]
    assert not model.requests
    model.queue = None
    wait_until(lambda: status() == 200, "still shut")


def test_prompt_is_named_as_the_caller_named_it(http: httpx.Client, model: FakeModel) -> None:
    for backend_name in ("text_input", "input_ids"):
        error = {"message": f"{backend_name} is bad", "status": 400, "param": backend_name}
        model.script = lambda request, error=error: iter([Piece(error=error)])
        answer = refusal(http.post(COMPLETIONS, json=completion()), 400, "prompt")
        assert answer["message"] == "prompt is bad"


def test_failure_mid_stream_is_an_event_then_the_end(http: httpx.Client, model: FakeModel) -> None:
    broken = {"message": "worker died", "status": 500}
    model.script = lambda request: iter([Piece("a"), Piece(error=broken)])
    received = events(http, CHAT, chat(stream=True))
    assert received[-1] == {
        "error": {"message": "worker died", "type": "server_error", "param": None, "code": None}
    }
    assert "[DONE]" not in received


def test_failure_mid_stream_raises_in_the_official_client(
    client: openai.OpenAI, model: FakeModel
) -> None:
    model.script = lambda request: iter([Piece("a"), Piece(error={"message": "x", "status": 500})])
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError):
        list(stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [endless, silent])
def test_client_that_leaves_cancels(
    running: ShimThread, model: FakeModel, stream: bool, script: Any
) -> None:
    model.script = script
    if script is endless and not stream:
        # One response at the end of an answer that takes for ever is the silent case again.
        model.script = silent
    body = json.dumps(chat(stream=stream)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: model.requests, "no request")
        if script is endless and stream:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert model.requests[0].cancelled.wait(10)
    tracker = running.server._tracker
    wait_until(lambda: tracker.num_open == 0, "the request is still open")


def test_client_that_leaves_with_another_request_behind_cancels(
    running: ShimThread, model: FakeModel
) -> None:
    model.script = silent
    body = json.dumps(chat(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(request + request)
        wait_until(lambda: model.requests, "no request")
    assert model.requests[0].cancelled.wait(3)  # before its silence ends it
    tracker = running.server._tracker
    wait_until(lambda: tracker.num_open == 0, "the request is still open")
    assert len(model.requests) == 1


def test_an_empty_line_behind_a_request_does_not_cut_its_answer(
    running: ShimThread, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    pieces = [*[Piece("x", delay_s=0.02)] * 20, Piece("!", finish_reason="length")]
    model.script = lambda _: iter(pieces)
    body = json.dumps(chat(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received = connection.recv(65536)
        connection.sendall(b"\r\n")
        while piece := connection.recv(65536):  # then the timer closes the connection
            received += piece
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_64_streams_each_finish_once(http: httpx.Client) -> None:
    def run(_: int) -> list[str]:
        received = events(http, CHAT, chat(stream=True, max_tokens=5))
        assert received[-1] == "[DONE]"
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in received[:-1]]
        return [reason for reason in reasons if reason]

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(run, range(64))) == [["length"]] * 64
