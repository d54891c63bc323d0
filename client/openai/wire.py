"""The OpenAI wire format: response bodies, stream events and error bodies."""

import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from shoal.client.errors import ShoalError
from shoal.client.openai.generation import ChoiceDelta
from shoal.client.openai.logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from shoal.client.openai.tool_calls import join_tool_calls
from shoal.client.types import Usage

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


def error_headers(error: ShoalError) -> dict[str, str]:
    """Retry-After (whole seconds, and milliseconds for clients that read them) where it helps."""
    if error.status not in (429, 503):
        return {}
    wait_ms = max(error.retry_after_ms or 1000, 1)
    return {"retry-after": str(math.ceil(wait_ms / 1000)), "retry-after-ms": str(wait_ms)}


class AnswerWire(Protocol):
    """Formats the answer to one request: whole, or its events in order."""

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes: ...

    def start_events(self, index: int) -> bytes: ...

    def delta_events(self, delta: ChoiceDelta) -> bytes: ...

    def end_events(self, usage: Usage) -> bytes: ...

    def error_event(self, error: ShoalError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Wire:
    """Formats the answer to one request. Chunks are assembled from bytes: they are the hot path."""

    model: str
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk: its choice's, so far
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""
    _around_text: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _usage_of: dict[int, Usage] = field(default_factory=dict, repr=False)  # by choice

    chunk_object = ""
    body_object = ""

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def end_events(self, usage: Usage) -> bytes:
        """What comes after the last choice has ended."""
        return (self._usage_event(usage) if self.include_usage else b"") + DONE_EVENT

    def error_event(self, error: ShoalError) -> bytes:
        """What ends a stream that failed."""
        return b"data: " + error_body(error) + b"\n\n"

    def _usage_event(self, usage: Usage) -> bytes:
        """The one chunk with usage: it has no choices and comes last."""
        body = {**self.head(self.chunk_object), "choices": [], "usage": usage_body(usage)}
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def event(self, choice: dict[str, Any]) -> bytes:
        body = {**self.head(self.chunk_object), "choices": [choice]}
        if self.include_usage:
            body["usage"] = self._running_usage(choice["index"])
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _note_usage(self, delta: ChoiceDelta) -> None:
        if self.continuous_usage:
            self._usage_of[delta.index] = delta.usage()

    def _running_usage(self, index: int) -> dict[str, Any] | None:
        if not self.continuous_usage:
            return None
        return usage_body(self._usage_of.get(index, Usage()))

    def text_event(self, index: int, text: str) -> bytes:
        """The event of new text and nothing else: all but the text is encoded once a choice."""
        if self.continuous_usage:
            return self.event(self.text_choice(index, text))
        around = self._around_text.get(index)
        if around is None:
            mark = f"text of {self.id}"
            before, after = self.event(self.text_choice(index, mark)).split(orjson.dumps(mark))
            around = self._around_text[index] = (before, after)
        return around[0] + orjson.dumps(text) + around[1]

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """What an event says of a choice that gained text and nothing else."""
        raise NotImplementedError

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        body = {
            **self.head(self.body_object),
            "choices": [self.choice(choice) for choice in choices],
            "usage": usage_body(usage),
        }
        return orjson.dumps(body)

    def choice(self, choice: ChoiceDelta) -> dict[str, Any]:
        raise NotImplementedError

    def start_events(self, index: int) -> bytes:
        """What opens a choice, before any text of it."""
        return b""

    def delta_events(self, delta: ChoiceDelta) -> bytes:
        """Zero or more events for new text and the end of a choice; none is ever empty."""
        raise NotImplementedError


class ChatWire(Wire):
    """Format of /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def choice(self, choice: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = join_tool_calls(choice.tool_calls)
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def start_events(self, index: int) -> bytes:
        return self._delta(index, {"role": "assistant", "content": ""})

    def delta_events(self, delta: ChoiceDelta) -> bytes:
        index, entries = delta.index, delta.logprobs
        self._note_usage(delta)
        events = b""
        if delta.reasoning:
            events += self._delta(index, {"reasoning_content": delta.reasoning})
        if entries:
            events += self._delta(index, {"content": delta.text}, None, entries)
        elif delta.text:
            events += self.text_event(index, delta.text)
        if delta.tool_calls:
            events += self._delta(index, {"tool_calls": delta.tool_calls})
        if delta.finish_reason is not None:
            events += self._delta(index, {}, delta.finish_reason)
        return events

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self._delta_choice(index, {"content": text})

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        entries: list[TokenLogprob] | None = None,
    ) -> bytes:
        return self.event(self._delta_choice(index, delta, finish_reason, entries))

    def _delta_choice(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        entries: list[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(entries) if entries else None,
            "finish_reason": finish_reason,
        }


class CompletionWire(Wire):
    """Format of /v1/completions."""

    chunk_object = "text_completion"
    body_object = "text_completion"

    def choice(self, choice: ChoiceDelta) -> dict[str, Any]:
        entries = choice.logprobs
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None if entries is None else completion_logprobs(entries),
            "finish_reason": choice.finish_reason,
        }

    def delta_events(self, delta: ChoiceDelta) -> bytes:
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return b""
        self._note_usage(delta)
        if delta.logprobs is None and delta.finish_reason is None:
            return self.text_event(delta.index, delta.text)
        return self.event(self.choice(delta))

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self.choice(ChoiceDelta(index, text, None))


def chat_wire(model: str, include_usage: bool, continuous_usage: bool = False) -> Wire:
    return ChatWire(model, include_usage, continuous_usage, id=f"chatcmpl-{uuid.uuid4().hex}")


def completion_wire(model: str, include_usage: bool, continuous_usage: bool = False) -> Wire:
    return CompletionWire(model, include_usage, continuous_usage, id=f"cmpl-{uuid.uuid4().hex}")
