"""Calls of tools: the backend's deltas in OpenAI's form, streamed and joined."""

from typing import Any

import orjson


def read_tool_calls(deltas: str | None) -> list[dict[str, Any]]:
    """Deltas as chunks have them: a call's id, type and name first, then its arguments."""
    return [_wire_delta(delta) for delta in orjson.loads(deltas)] if deltas else []


def _wire_delta(delta: dict[str, Any]) -> dict[str, Any]:
    if delta["id"] is None:
        return {"index": delta["index"], "function": {"arguments": delta["arguments"]}}
    function = {"name": delta["name"], "arguments": delta["arguments"]}
    return {"index": delta["index"], "id": delta["id"], "type": "function", "function": function}


def join_tool_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole calls, as a message has them."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if "id" in delta:
            function = dict(delta["function"])
            calls[delta["index"]] = {"id": delta["id"], "type": "function", "function": function}
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return list(calls.values())
