"""The check of answers against OpenAI's document, which all tests with the shim go through."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_triton import MODEL, FakeTriton
from openai_document import FINDINGS, SCHEMAS, check_answer
from shim_thread import ShimThread

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "logprobs": True, "tools": []},
    TEXT: {"prompt": "a b", "n": 2},
    RESPONSES: {"input": "hi"},
    "/v1/embeddings": {"input": "a"},
}
Change = Callable[[dict[str, Any]], Any]

# By path: what spoils a whole answer.
SPOILED: list[tuple[str, Change]] = [
    (CHAT, lambda body: body.pop("created")),
    (CHAT, lambda body: body["choices"][0].pop("logprobs")),
    (CHAT, lambda body: body["choices"][0]["message"].pop("refusal")),
    (CHAT, lambda body: body["choices"][0].update(finish_reason=None)),
    (CHAT, lambda body: body["usage"].update(total_tokens="3")),
    (TEXT, lambda body: body["choices"][1].update(index="1")),
    (TEXT, lambda body: body["choices"][0].update(finish_reason=None)),
    (RESPONSES, lambda body: body["output"][0].pop("id")),
    (RESPONSES, lambda body: body.update(user=None)),
]
# What spoils a stream's second event.
SPOILED_EVENTS: list[tuple[str, Change]] = [
    (CHAT, lambda event: event["choices"][0].pop("finish_reason")),
    (CHAT, lambda event: event.update(object="chat.completion")),
    (TEXT, lambda event: event["choices"][0].update(text=None)),
    (RESPONSES, lambda event: event.pop("sequence_number")),
    (RESPONSES, lambda event: event.update(sequence_number=5)),
    (RESPONSES, lambda event: event.update(type="response.created")),
]


def get(path: str, http: httpx.Client, **fields: Any) -> httpx.Response:
    answer = http.post(path, json={"model": MODEL, **BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[httpx.Response, httpx.Response]]:
    """By path: whole and streamed."""
    with FakeTriton() as triton, ShimThread(triton.url) as shim:
        shim.wait_ready()
        with httpx.Client(base_url=shim.url, timeout=20) as http:
            found = {
                path: (get(path, http), get(path, http, stream=True))
                for path in (CHAT, TEXT, RESPONSES)
            }
    return found


def check(path: str, answer: httpx.Response, body: bytes) -> None:
    check_answer("POST", path, answer.status_code, answer.headers["content-type"], body)


@pytest.mark.parametrize(("path", "spoil"), SPOILED)
def test_spoiled_answers_are_found(answers: Any, path: str, spoil: Change) -> None:
    whole = answers[path][0]
    check(path, whole, whole.content)
    body = whole.json()
    spoil(body)
    with pytest.raises(AssertionError):
        check(path, whole, json.dumps(body).encode())


@pytest.mark.parametrize(("path", "spoil"), SPOILED_EVENTS)
def test_spoiled_events_are_found(answers: Any, path: str, spoil: Change) -> None:
    streamed = answers[path][1]
    check(path, streamed, streamed.content)
    first, second, rest = streamed.content.split(b"\n\n", 2)
    head, _, data = second.partition(b"data: ")
    event = json.loads(data)
    spoil(event)
    second = head + b"data: " + json.dumps(event).encode()
    with pytest.raises((AssertionError, KeyError)):
        check(path, streamed, b"\n\n".join((first, second, rest)))


def test_what_the_shim_sends_is_checked() -> None:
    before = FINDINGS.num_checked
    with FakeTriton() as triton, ShimThread(triton.url) as shim:
        shim.wait_ready()
        assert httpx.get(f"{shim.url}/v1/models").status_code == 200
        assert httpx.post(f"{shim.url}{CHAT}", json={"model": MODEL}).status_code == 400
    assert FINDINGS.num_checked > before + 2  # and readiness, which is not OpenAI's


def test_every_endpoint_of_the_api_has_its_schema() -> None:
    with FakeTriton() as triton:
        shim = ShimThread(triton.url)
        routes = {
            f"{method} {route.path}"
            for route in shim.app.routes
            for method in route.methods
            if route.path.startswith("/v1/") and method != "HEAD"
        }
    known = {name if not name.endswith("/") else name + "{" for name in SCHEMAS}
    without = {route for route in routes if not any(route.startswith(name) for name in known)}
    # The document gives the answer to a deletion no schema.
    assert without == {"DELETE /v1/responses/{response_id}"}
