"""The OpenAI shim over real HTTP: the official client, raw HTTP, and clients that leave."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_triton import MODEL, FakeModel, FakeTriton, Piece, Request, echo_script
from shim_thread import ShimThread, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def triton() -> Iterator[FakeTriton]:
    with FakeTriton(fake=FakeModel(), onnx=FakeModel(is_shoal=False)) as server:
        yield server


@pytest.fixture(scope="module")
def running(triton: FakeTriton) -> Iterator[ShimThread]:
    with ShimThread(triton.url) as shim:
        shim.wait_ready()
        yield shim


@pytest.fixture
def model(triton: FakeTriton) -> Iterator[FakeModel]:
    yield triton.model
    triton.model.script = echo_script
    triton.model.num_cached_tokens = 0
    triton.model.requests.clear()


@pytest.fixture
def http(running: ShimThread, model: FakeModel) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=20) as client:
        yield client


@pytest.fixture
def client(running: ShimThread, model: FakeModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def endless(request: Request) -> Iterator[Piece]:
    while True:
        yield Piece("x", delay_s=0.01)


def silent(request: Request) -> Iterator[Piece]:
    yield Piece("never", delay_s=3600)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "a b", **fields}


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The decoded events of a stream; "[DONE]" stays a string."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def refusal(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return dict(error)


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


def test_several_prompts(http: httpx.Client, model: FakeModel) -> None:
    def by_prompt(request: Request) -> Iterator[Piece]:
        text = request.inputs.get("text_input") or str(request.inputs["input_ids"])
        yield Piece(text, 2)
        yield Piece("!", 1, "stop")

    model.script = by_prompt
    body = completion(prompt=["one", "two", "three"])
    answer = http.post(COMPLETIONS, json=body).json()
    choices = [(item["index"], item["text"]) for item in answer["choices"]]
    assert choices == [(0, "one!"), (1, "two!"), (2, "three!")]
    assert answer["usage"]["completion_tokens"] == 9
    body = completion(prompt=[[1, 2], [3]], stream=True, stream_options={"include_usage": True})
    received = events(http, COMPLETIONS, body)
    texts = {0: "", 1: ""}
    finishes = []
    for chunk in received[:-2]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        finishes += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "[1, 2]!", 1: "[3]!"}
    assert sorted(finishes) == [0, 1]
    assert received[-2]["usage"]["prompt_tokens"] == 3


def test_one_refused_prompt_refuses_all(http: httpx.Client, model: FakeModel) -> None:
    def refuse_second(request: Request) -> Iterator[Piece]:
        if request.inputs["text_input"] == "b":
            return iter([Piece(error={"message": "no", "status": 400, "param": "prompt"})])
        return endless(request)

    model.script = refuse_second
    refusal(http.post(COMPLETIONS, json=completion(prompt=["a", "b"], stream=True)), 400, "prompt")
    (first,) = [item for item in model.requests if item.inputs["text_input"] == "a"]
    assert first.cancelled.wait(10)


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


def test_64_streams_each_finish_once(http: httpx.Client) -> None:
    def run(_: int) -> list[str]:
        received = events(http, CHAT, chat(stream=True, max_tokens=5))
        assert received[-1] == "[DONE]"
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in received[:-1]]
        return [reason for reason in reasons if reason]

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(run, range(64))) == [["length"]] * 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 10**30}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 0}, "n"),
        ({"n": 33}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"frequency_penalty": "0.5"}, "frequency_penalty"),
        ({"presence_penalty": [-1]}, "presence_penalty"),
        ({"repetition_penalty": True}, "repetition_penalty"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"nonsense": 1}, "nonsense"),
        ({"nonsense": None}, "nonsense"),
    ],
)
def test_bad_fields_are_named(
    http: httpx.Client, model: FakeModel, fields: dict[str, Any], param: str
) -> None:
    for stream in ({}, {"stream": True}):
        error = refusal(http.post(CHAT, json={**chat(**stream), **fields}), 400, param)
        assert param.split("[")[0] in error["message"]
    assert not model.requests


def test_stream_options_need_a_stream(http: httpx.Client) -> None:
    body = chat(stream_options={"include_usage": True})
    refusal(http.post(CHAT, json=body), 400, "stream_options")


def scored(request: Request) -> Iterator[Piece]:
    """ "né" in three tokens, the middle one half a character, then the end."""
    tokens = [("n", [110], -0.25, 1), ("", [195], -1.5, None), ("é", [169], -0.5, 2)]
    for index, (text, raw, logprob, rank) in enumerate(tokens):
        entry = {str(raw[0]): candidate(text, raw, logprob, rank)}
        if rank != 1:
            entry["120"] = candidate("x", [120], -0.125, 1)
        yield Piece(text, logprobs=(entry,), finish_reason="length" if index == 2 else None)


def candidate(text: str, raw: list[int], logprob: float | None, rank: int | None) -> dict[str, Any]:
    return {"decoded_token": text, "bytes": raw, "logprob": logprob, "rank": rank}


def test_chat_logprobs_with_the_official_client(client: openai.OpenAI, model: FakeModel) -> None:
    model.script = scored
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    assert model.requests[0].sampling == {"logprobs": 2}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(item.token, item.bytes, item.logprob) for item in logprobs.content] == [
        ("n", [110], -0.25),
        ("", [195], -1.5),
        ("é", [169], -0.5),
    ]
    tops = [[item.token for item in entry.top_logprobs] for entry in logprobs.content]
    assert tops == [["n"], ["x"], ["x", "é"]]
    streamed = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, stream=True
    )
    entries = [
        item
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs is not None
        for item in choice.logprobs.content or []
    ]
    assert [(item.token, item.logprob) for item in entries] == [
        ("n", -0.25),
        ("", -1.5),
        ("é", -0.5),
    ]
    assert model.requests[1].sampling == {"logprobs": 0}


def test_completion_logprobs_with_the_official_client(
    client: openai.OpenAI, model: FakeModel
) -> None:
    model.script = scored
    whole = client.completions.create(model=MODEL, prompt="a", logprobs=2).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens == ["n", "", "é"]
    assert whole.logprobs.token_logprobs == [-0.25, -1.5, -0.5]
    assert whole.logprobs.text_offset == [0, 1, 1]
    assert whole.logprobs.top_logprobs == [
        {"n": -0.25},
        {"x": -0.125, "": -1.5},
        {"x": -0.125, "é": -0.5},
    ]
    streamed = client.completions.create(model=MODEL, prompt="a", logprobs=0, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [offset for part in parts for offset in part.text_offset or []] == [0, 1, 1]


def echoing(request: Request) -> Iterator[Piece]:
    entries = ({"97": candidate("a", [97], None, None)}, {"98": candidate("b", [98], -2.0, 1)})
    yield Piece("ab", num_tokens=0, prompt_logprobs=entries)
    entry = {"110": candidate("n", [110], -0.25, 1)}
    yield Piece("n", logprobs=(entry,), finish_reason="length")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_and_its_logprobs_first(
    client: openai.OpenAI, model: FakeModel, stream: bool
) -> None:
    model.script = echoing
    answer = client.completions.create(
        model=MODEL, prompt="ab", echo=True, logprobs=1, max_tokens=1, stream=stream
    )
    chunks = list(answer) if stream else [answer]
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == "abn"
    logprobs = [part.logprobs for part in parts if part.logprobs]
    assert [token for part in logprobs for token in part.tokens or []] == ["a", "b", "n"]
    values = [value for part in logprobs for value in part.token_logprobs or []]
    assert values == [None, -2.0, -0.25]
    tops = [item for part in logprobs for item in part.top_logprobs or []]
    assert tops == [None, {"b": -2.0}, {"n": -0.25}]
    assert [at for part in logprobs for at in part.text_offset or []] == [0, 1, 2]
    (request,) = model.requests
    assert request.inputs["exclude_input_in_output"] is False
    assert request.sampling == {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}


def calling(request: Request) -> Iterator[Piece]:
    first = {"index": 0, "id": "call_1", "name": "f", "arguments": ""}
    more = {"index": 0, "id": None, "name": None}
    second = {"index": 1, "id": "call_2", "name": "g", "arguments": "{}"}
    yield Piece("So: ")
    yield Piece(tool_calls=(first, {**more, "arguments": '{"a"'}))
    yield Piece(tool_calls=({**more, "arguments": ": 1}"}, second))
    yield Piece(finish_reason="tool_calls")


TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]


def test_tool_calls_with_the_official_client(client: openai.OpenAI, model: FakeModel) -> None:
    model.script = calling
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    choice = client.chat.completions.create(**asked, tool_choice="auto").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So: "
    whole = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert whole == [("call_1", "f", '{"a": 1}'), ("call_2", "g", "{}")]
    assert model.requests[0].sampling == {"tools": TOOLS, "tool_choice": "auto"}
    calls: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                assert call.type == "function"
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments
    assert [tuple(call) for call in calls.values()] == whole


def test_a_message_that_only_calls_has_no_content(http: httpx.Client, model: FakeModel) -> None:
    model.script = lambda request: iter(list(calling(request))[1:])
    message = http.post(CHAT, json=chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


def test_without_logprobs_none_are_asked_for(http: httpx.Client, model: FakeModel) -> None:
    model.script = scored
    answer = http.post(CHAT, json=chat(logprobs=False)).json()
    assert answer["choices"][0]["logprobs"] is None
    assert "return_logprobs" not in model.requests[0].inputs


def test_what_structures_the_output_goes_to_the_backend(
    http: httpx.Client, model: FakeModel
) -> None:
    formats = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}
    assert http.post(CHAT, json=chat(response_format=formats)).status_code == 200
    assert http.post(COMPLETIONS, json=completion(guided_choice=["a", "b"])).status_code == 200
    assert model.requests[0].sampling == {"response_format": formats}
    assert model.requests[1].sampling == {"guided_choice": ["a", "b"]}


def test_neutral_values_are_as_if_absent(http: httpx.Client, model: FakeModel) -> None:
    body = chat(
        n=None,
        logprobs=False,
        top_logprobs=None,
        response_format=None,
        frequency_penalty=None,
        logit_bias=None,
        max_tokens=None,
        temperature=None,
        stop=None,
        user="me",
        store=False,
    )
    assert http.post(CHAT, json=body).status_code == 200
    assert model.requests[0].sampling == {}


def test_completions_are_not_cut_short_by_default(http: httpx.Client, model: FakeModel) -> None:
    http.post(COMPLETIONS, json=completion(max_tokens=None))
    http.post(COMPLETIONS, json=completion(max_tokens=7))
    assert [item.sampling.get("max_tokens") for item in model.requests] == [None, 7]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (3, "prompt"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
        ([1, "a"], "prompt"),
        ([1, True], "prompt"),
        ([1.5], "prompt[0]"),
        ([-1], "prompt"),
        ([[2**40]], "prompt[0]"),
        (["a"] * 33, "prompt"),
    ],
)
def test_bad_prompts_are_named(http: httpx.Client, prompt: Any, param: str) -> None:
    refusal(http.post(COMPLETIONS, json=completion(prompt=prompt)), 400, param)


def test_missing_fields_are_named(http: httpx.Client) -> None:
    refusal(http.post(CHAT, json={"messages": MESSAGES}), 400, "model")
    refusal(http.post(CHAT, json={"model": MODEL}), 400, "messages")
    refusal(http.post(COMPLETIONS, json={"model": MODEL}), 400, "prompt")


@pytest.mark.parametrize("name", ["nope", "onnx", "", "x" * 5000])
def test_unknown_model_is_404(http: httpx.Client, name: str) -> None:
    response = http.post(CHAT, json=chat(model=name))
    assert refusal(response, 404, "model")["code"] == "model_not_found"
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"1", 400),
        (b'"x"', 400),
        (b"null", 400),
        (b'{"model": "\xff"}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b"[" * 100_000, 400),
        (b"[" * 500 + b"]" * 500, 400),
        (b'{"messages": ' + b"[" * 32 + b"]" * 32 + b"}", 400),
        (b" " * (4 * 1024 * 1024 + 1), 413),
    ],
)
def test_bad_bodies(http: httpx.Client, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    refusal(http.post(CHAT, content=body, headers=headers), status, None)
    assert http.post(CHAT, json=chat()).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_named(http: httpx.Client, number: str) -> None:
    body = f'{{"model": "fake", "messages": [], "temperature": {number}}}'
    headers = {"content-type": "application/json"}
    refusal(http.post(CHAT, content=body, headers=headers), 400, "temperature")


def test_chunked_body_is_capped_too(http: httpx.Client) -> None:
    pieces = (b" " * 65536 for _ in range(100))
    response = http.post(CHAT, content=pieces, headers={"content-type": "application/json"})
    refusal(response, 413, None)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_wrong_media_type_is_415(http: httpx.Client, headers: dict[str, str]) -> None:
    refusal(http.post(CHAT, content=json.dumps(chat()).encode(), headers=headers), 415, None)


def test_routing_errors_have_the_same_form(http: httpx.Client) -> None:
    refusal(http.get("/nope"), 404, None)
    response = http.get(CHAT)
    refusal(response, 405, None)
    assert response.headers["allow"] == "POST"
    assert response.headers["allow"] == "POST"
    assert "Allowed: POST." in response.json()["error"]["message"]
    response = http.delete("/v1/models")
    assert "Allowed: GET, HEAD." in refusal(response, 405, None)["message"]
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models", "/health/live", "/health/ready"])
def test_trailing_slash_is_no_redirect(http: httpx.Client, path: str) -> None:
    response = http.get(f"{path}/", headers={"host": "evil.example"})
    refusal(response, 404, response.json()["error"]["param"])
    assert "location" not in response.headers


@pytest.mark.parametrize(
    "path", ["/health/live", "/health/ready", "/v1/models", f"/v1/models/{MODEL}"]
)
def test_head_answers_as_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert head.status_code == get.status_code == 200
    assert (head.content, head.headers["content-length"]) == (b"", str(len(get.content)))


def test_request_id(http: httpx.Client, model: FakeModel) -> None:
    response = http.post(CHAT, json=chat(), headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert model.requests[0].id == "abc-1"
    for bad in ("a b", "x" * 200, "<script>"):
        given = http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert given != bad
        assert len(given) == 32


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health/live").json() == {"status": "live"}
    ready = http.get("/health/ready").json()
    assert (ready["ready"], ready["models"]) == ([MODEL], {MODEL: "ready"})
    health = http.get("/health").json()
    assert health["models"][MODEL]["max_model_len"] == 128
    assert health["models"][MODEL]["self_test"] == {"ok": True, "num_prompts": 4}
    assert http.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"x: " + b"y" * 70_000 + b"\r\n", 431),
        (b"".join(b"h%d: v\r\n" % i for i in range(150)), 431),
        (b"bad header\r\n", 400),
    ],
)
def test_bad_heads(running: ShimThread, head: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'{"error":' in answer


def test_large_body_on_one_connection_is_no_head(http: httpx.Client, model: FakeModel) -> None:
    messages = [{"role": "user", "content": "x" * 300_000}]
    for _ in range(3):
        assert http.post(CHAT, json=chat(messages=messages)).status_code == 200
    assert len(model.requests) == 3


def test_headers_say_whose_a_request_is(http: httpx.Client, model: FakeModel) -> None:
    headers = {"X-Shoal-Tenant": "acme", "X-Shoal-Slo-Class": "gold", "X-Other": "1"}
    assert http.post(COMPLETIONS, json=completion(), headers=headers).status_code == 200
    said = {k: v for k, v in model.requests[0].parameters.items() if k.startswith("x-")}
    assert said == {"x-shoal-tenant": "acme", "x-shoal-slo-class": "gold"}


def choice_text(index: int, count: int) -> str:
    return "".join(f"c{index}w{step} " for step in range(count))


def test_choices_of_a_chat(client: openai.OpenAI, model: FakeModel) -> None:
    model.num_cached_tokens = 1
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [choice_text(index, 2 + index) for index in range(3)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    (request,) = model.requests
    assert request.sampling["n"] == 3
    assert answer.usage is not None
    prompt_tokens = len(request.inputs["messages"].split())
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 2 + 3 + 4
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_streamed_choices_of_a_chat(client: openai.OpenAI, model: FakeModel) -> None:
    texts, reasons, usages = ["", "", ""], {}, []
    with client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=2,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                assert choice.index not in reasons, "a choice goes on after its end"
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    assert texts == [choice_text(index, 2 + index) for index in range(3)]
    assert reasons == dict.fromkeys(range(3), "length")
    assert [usage.completion_tokens for usage in usages] == [9]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts(client: openai.OpenAI, model: FakeModel, stream: bool) -> None:
    texts: dict[int, str] = {}
    prompts = ["a b", "c"]
    if stream:
        with client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=2, n=2, stream=True
        ) as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + choice.text
    else:
        answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=2, n=2)
        texts = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
        assert answer.usage.completion_tokens == 2 * (2 + 3)
    expected = [choice_text(index, 2 + index) for index in range(2)] * 2
    assert texts == dict(enumerate(expected))


def test_prompts_of_one_request_say_how_many_they_are(http: httpx.Client, model: FakeModel) -> None:
    for prompt, told in ((["a", "b", "c"], 3), (["a"], None), ("a", None)):
        model.requests.clear()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert {request.parameters.get("num_prompts") for request in model.requests} == {told}


def test_the_choices_of_all_prompts_are_bounded(http: httpx.Client, model: FakeModel) -> None:
    body = completion(prompt=["a"] * 10, n=13)
    error = refusal(http.post(COMPLETIONS, json=body), 400, "n")
    assert "12" in error["message"]
    assert not model.requests


def test_one_choice_asked_for_by_number_is_a_request_for_one(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=chat(n=1, max_tokens=2)).json()
    assert answer["choices"][0]["message"]["content"] == "w0 w1 "
