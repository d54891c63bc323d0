"""Requests to an OpenAI endpoint that wants keys."""

from typing import Any

from fake_triton import MODEL

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
