"""What tests of the OpenAI shim send, and how they read what comes back."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
from fake_pieces import Piece, Request
from fake_triton import MODEL

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


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
