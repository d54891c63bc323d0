"""The OpenAI wire format: response bodies, stream events and error bodies."""

import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson

from shoal.client.errors import ShoalError
from shoal.client.types import Completion, Usage

DONE_EVENT = b"data: [DONE]\n\n"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_body(error: ShoalError) -> bytes:
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_event(error: ShoalError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: ShoalError) -> dict[str, str]:
    """Retry-After (whole seconds, and milliseconds for clients that read them) where it helps."""
    if error.status not in (429, 503):
        return {}
    wait_ms = max(error.retry_after_ms or 1000, 1)
    return {"retry-after": str(math.ceil(wait_ms / 1000)), "retry-after-ms": str(wait_ms)}


@dataclass(frozen=True, slots=True)
class Wire:
    """Formats the answer to one request. Chunks are assembled from bytes: they are the hot path."""

    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    chunk_object = ""
    body_object = ""

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage_event(self, usage: Usage) -> bytes:
        """The one chunk with usage: it has no choices and comes last."""
        body = {**self.head(self.chunk_object), "choices": [], "usage": usage_body(usage)}
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def event(self, choice: dict[str, Any]) -> bytes:
        body = {**self.head(self.chunk_object), "choices": [choice]}
        if self.include_usage:
            body["usage"] = None
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def body(self, completions: list[Completion], usage: Usage) -> bytes:
        choices = [self.choice(index, item) for index, item in enumerate(completions)]
        head = self.head(self.body_object)
        return orjson.dumps({**head, "choices": choices, "usage": usage_body(usage)})

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def start_events(self, index: int) -> bytes:
        """What opens a choice, before any text of it."""
        return b""

    def text_events(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """Zero or more events for new text and the end of a choice; none is ever empty."""
        raise NotImplementedError


class ChatWire(Wire):
    """Format of /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }

    def start_events(self, index: int) -> bytes:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def text_events(self, index: int, text: str, finish_reason: str | None) -> bytes:
        events = self._delta(index, {"content": text}, None) if text else b""
        if finish_reason is not None:
            events += self._delta(index, {}, finish_reason)
        return events

    def _delta(self, index: int, delta: dict[str, str], finish_reason: str | None) -> bytes:
        return self.event(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        )


class CompletionWire(Wire):
    """Format of /v1/completions."""

    chunk_object = "text_completion"
    body_object = "text_completion"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._choice(index, completion.text, completion.finish_reason)

    def text_events(self, index: int, text: str, finish_reason: str | None) -> bytes:
        if not text and finish_reason is None:
            return b""
        return self.event(self._choice(index, text, finish_reason))

    def _choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def chat_wire(model: str, include_usage: bool) -> Wire:
    return ChatWire(model, include_usage, id=f"chatcmpl-{uuid.uuid4().hex}")


def completion_wire(model: str, include_usage: bool) -> Wire:
    return CompletionWire(model, include_usage, id=f"cmpl-{uuid.uuid4().hex}")
