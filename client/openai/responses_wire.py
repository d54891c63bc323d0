"""The format of /v1/responses: the response object, and the events that build it up."""

import copy
import time
import uuid
from collections.abc import Callable
from typing import Any

import orjson

from shoal.client.errors import ShoalError
from shoal.client.openai.generation import ChoiceDelta
from shoal.client.openai.logprobs import chat_logprobs
from shoal.client.types import Usage

Event = tuple[str, dict[str, Any]]


class ResponsesWire:
    """One answer. Its output items open and close in the order in which the model writes: thoughts,
    text, calls. ``remember`` gets the finished response, and the turn as a message of a chat."""

    def __init__(
        self,
        echo: dict[str, Any],
        store: bool,
        remember: Callable[[str, bytes, dict[str, Any]], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "error": None,
            "store": store,
            **echo,
        }
        self._remember = remember if store else None
        self._sequence_number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while it grows
        self._finish_reason: str | None = None

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        self._take(choices[0])
        return self._finish(usage)[1]

    def start_events(self, index: int) -> bytes:
        response = self._response("in_progress")
        return self._encode(
            [
                ("response.created", {"response": response}),
                ("response.in_progress", {"response": response}),
            ]
        )

    def delta_events(self, delta: ChoiceDelta) -> bytes:
        return self._encode(self._take(delta))

    def end_events(self, usage: Usage) -> bytes:
        response, _ = self._finish(usage)
        return self._encode([(f"response.{response['status']}", {"response": response})])

    def error_event(self, error: ShoalError) -> bytes:
        response = self._response("failed")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": error.message}
        return self._encode([("response.failed", {"response": response})])

    def _encode(self, events: list[Event]) -> bytes:
        parts = []
        for kind, values in events:
            values = {"type": kind, "sequence_number": self._sequence_number, **values}
            self._sequence_number += 1
            parts.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(values)))
        return b"".join(parts)

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        is_cut = status == "incomplete"
        response = {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
        }
        return response if usage is None else {**response, "usage": usage_body(usage)}

    def _finish(self, usage: Usage) -> tuple[dict[str, Any], bytes]:
        status = "incomplete" if self._finish_reason == "length" else "completed"
        response = self._response(status, usage)
        body = orjson.dumps(response)
        if self._remember is not None:
            self._remember(self.id, body, self._message())
        return response, body

    def _message(self) -> dict[str, Any]:
        texts = [item["content"][0]["text"] for item in self._output if item["type"] == "message"]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self._output
            if item["type"] == "function_call"
        ]
        return {**message, "tool_calls": calls} if calls else message

    def _take(self, delta: ChoiceDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._thoughts(delta.reasoning)
        if delta.text or delta.logprobs:
            events += self._text(delta)
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if not self._output:  # an answer of nothing is a message too
                events += self._text(ChoiceDelta(0, "", None))
            events += self._close()
        return events

    def _thoughts(self, text: str) -> list[Event]:
        part = {"type": "reasoning_text", "text": ""}
        events = self._ensure("reasoning", {"id": _id("rs"), "summary": [], "content": []}, part)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        where = {**self._where(), "content_index": 0}
        return [*events, ("response.reasoning_text.delta", {**where, "delta": text})]

    def _text(self, delta: ChoiceDelta) -> list[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": _id("msg"), "role": "assistant", "content": []}
        events = self._ensure("message", item, part)
        assert self._open is not None
        entries = chat_logprobs(delta.logprobs)["content"] if delta.logprobs else []
        self._open["content"][0]["text"] += delta.text
        self._open["content"][0]["logprobs"] += entries
        if not delta.text and not entries:
            return events
        where = {**self._where(), "content_index": 0}
        values = {**where, "delta": delta.text, "logprobs": _event_logprobs(entries)}
        return [*events, ("response.output_text.delta", values)]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        function = call["function"]
        if "id" in call:
            item = {"id": _id("fc"), "call_id": call["id"], "name": function["name"]}
            events += self._close() + self._begin("function_call", {**item, "arguments": ""})
        if function["arguments"]:
            assert self._open is not None
            self._open["arguments"] += function["arguments"]
            values = {**self._where(), "delta": function["arguments"]}
            events.append(("response.function_call_arguments.delta", values))
        return events

    def _ensure(self, kind: str, item: dict[str, Any], part: dict[str, Any]) -> list[Event]:
        """An open item of this kind, with its one part."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close() + self._begin(kind, item)
        assert self._open is not None
        added = {**self._where(), "content_index": 0, "part": copy.deepcopy(part)}
        self._open["content"] = [part]
        return [*events, ("response.content_part.added", added)]

    def _begin(self, kind: str, item: dict[str, Any]) -> list[Event]:
        self._open = {"type": kind, "status": "in_progress", **item}
        self._output.append(self._open)
        values = {"output_index": len(self._output) - 1, "item": dict(self._open)}
        return [("response.output_item.added", values)]

    def _close(self) -> list[Event]:
        item, where = self._open, self._where()
        if item is None:
            return []
        self._open = None
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        done = {"output_index": where["output_index"], "item": item}
        events: list[Event] = []
        if item["type"] == "function_call":
            values = {**where, "name": item["name"], "arguments": item["arguments"]}
            events.append(("response.function_call_arguments.done", values))
        else:
            part, where = item["content"][0], {**where, "content_index": 0}
            values = {**where, "text": part["text"]}
            if item["type"] == "message":
                values["logprobs"] = _event_logprobs(part["logprobs"])
                events.append(("response.output_text.done", values))
            else:
                events.append(("response.reasoning_text.done", values))
            events.append(("response.content_part.done", {**where, "part": part}))
        return [*events, ("response.output_item.done", done)]

    def _where(self) -> dict[str, Any]:
        item_id = self._open["id"] if self._open is not None else None
        return {"item_id": item_id, "output_index": len(self._output) - 1}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _event_logprobs(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events have no bytes of tokens."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": item["token"], "logprob": item["logprob"]}
                for item in entry["top_logprobs"]
            ],
        }
        for entry in entries
    ]


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
