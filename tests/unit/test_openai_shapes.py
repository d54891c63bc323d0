"""Every kind of answer against the official client's own types, strictly, streamed and not."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_pieces import Piece, Request, echo_script
from fake_triton import MODEL, FakeModel, FakeTriton
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai_shapes import check, sse_events
from shim_thread import ShimThread

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def entry(text: str, logprob: float | None = -0.5) -> dict[str, Any]:
    return {"7": {"logprob": logprob, "rank": 1, "decoded_token": text, "bytes": [97]}}


def everything(request: Request) -> Iterator[Piece]:
    """What an answer can hold, as far as its request allows."""
    is_chat = "messages" in request.inputs
    if request.sampling.get("n", 1) > 1:
        yield from echo_script(request)
        return
    logprobs = (entry("a"),) if "logprobs" in request.sampling else ()
    if is_chat:
        yield Piece(reasoning="hm")
    yield Piece("a", logprobs=logprobs)
    if is_chat and "tools" in request.sampling:
        yield Piece(tool_calls=({"index": 0, "id": "c", "name": "f", "arguments": "{"},))
        yield Piece(tool_calls=({"index": 0, "id": None, "name": None, "arguments": "}"},))
        yield Piece(finish_reason="tool_calls")
    else:
        yield Piece(finish_reason="stop")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with FakeTriton(fake=FakeModel(script=everything)) as triton, ShimThread(triton.url) as shim:
        shim.wait_ready()
        with httpx.Client(base_url=shim.url, timeout=20) as client:
            yield client


MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"logprobs": True, "top_logprobs": 1, "metadata": {"a": "b"}, "user": "u"}),
    (CHAT, {"tools": [TOOL]}),
    (CHAT, {"n": 2, "max_tokens": 2}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}, "add_generation_prompt": True}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"logprobs": 1}),
    (COMPLETIONS, {"n": 2, "max_tokens": 2}),
    (COMPLETIONS, {"prompt": [[1], [2, 3]]}),
]


@pytest.mark.parametrize(("path", "fields"), CASES)
def test_completions(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    body = {"model": MODEL, **start, **fields}
    whole = http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    check(ChatCompletion if path == CHAT else Completion, whole.json())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = sse_events(http.post(path, json={**body, **options}).text)
    assert events.pop() == "[DONE]"
    for event in events:
        if path == COMPLETIONS:  # its stream has the type of the whole answer, but for open ends
            open_choices = [c for c in event["choices"] if c["finish_reason"] is None]
            for choice in open_choices:
                choice["finish_reason"] = "stop"
        check(ChatCompletionChunk if path == CHAT else Completion, event)
    assert events[-1]["usage"] == whole.json()["usage"]


def test_reasoning_is_beside_the_content(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES}
    message = http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "a")
    events = sse_events(http.post(CHAT, json={**body, "stream": True}).text)[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[1:] == [{"reasoning_content": "hm"}, {"content": "a"}, {}]


def embedding(request: Request) -> Iterator[Piece]:
    yield Piece(finish_reason="length", num_tokens=0, embedding=(0.6, 0.8))


def test_embeddings() -> None:
    with FakeTriton(fake=FakeModel(script=embedding)) as triton, ShimThread(triton.url) as shim:
        shim.wait_ready()
        with openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0) as client:
            made = client.embeddings.create(model=MODEL, input=["a b", "c"], dimensions=2)
            assert [item.embedding for item in made.data] == [pytest.approx([0.6, 0.8])] * 2
            assert made.usage.prompt_tokens == 3  # the client asks for base64 by itself
            assert triton.model.requests[0].sampling == {"pooling": "mean", "dimensions": 2}
        with httpx.Client(base_url=shim.url, timeout=20) as http:
            for given in ("a", [1, 2], ["a"], [[1], [2, 3]]):
                answer = http.post("/v1/embeddings", json={"model": MODEL, "input": given})
                check(CreateEmbeddingResponse, answer.json())
            for fields, param in (
                ({}, "input"),
                ({"input": []}, "input"),
                ({"input": ["a", ""]}, "input[1]"),
                ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
                ({"input": "a", "dimensions": "2"}, "dimensions"),
                ({"input": "a", "stream": True}, "stream"),
            ):
                answer = http.post("/v1/embeddings", json={"model": MODEL, **fields})
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"] == param


def test_models(http: httpx.Client) -> None:
    for model in http.get("/v1/models").json()["data"]:
        check(Model, model)
        check(Model, http.get(f"/v1/models/{model['id']}").json())


def test_the_check_itself() -> None:
    good = {"id": "m", "object": "model", "created": 1, "owned_by": "x"}
    check(Model, good)
    for bad in ({**good, "extra": 1}, {**good, "created": "1"}, {"id": "m"}):
        with pytest.raises((AssertionError, ValueError)):
            check(Model, bad)
