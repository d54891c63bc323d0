"""Sums up the deltas of one answer."""

import json
from dataclasses import replace

from shoal.client.types import Completion, Delta, ToolCall, Usage


class Tally:
    """Of an answer's first choice, and the further ones of a request for several choices."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.token_ids: list[int] = []
        self.calls: dict[int, ToolCall] = {}  # by index
        self.own_usage = Usage()
        self.finish_reason: str | None = None
        self.others: dict[int, Tally] = {}  # by index

    def add(self, delta: Delta) -> None:
        if delta.index:
            self.others.setdefault(delta.index, Tally()).add(
                replace(delta, index=0, num_input_tokens=0, num_cached_tokens=0)
            )
            return
        self.texts.append(delta.text)
        self.thoughts.append(delta.reasoning)
        self.token_ids += delta.token_ids
        self.own_usage = Usage(
            max(self.own_usage.prompt_tokens, delta.num_input_tokens),
            self.own_usage.completion_tokens + delta.num_output_tokens,
            max(self.own_usage.cached_tokens, delta.num_cached_tokens),
        )
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.tool_calls:
            self._add_calls(delta.tool_calls)

    @property
    def usage(self) -> Usage:
        """Of all choices."""
        return sum((other.own_usage for other in self.others.values()), self.own_usage)

    def completion(self) -> Completion:
        return Completion(
            "".join(self.texts),
            self.finish_reason or "",
            self.own_usage,
            tuple(self.token_ids),
            tuple(self.others[index].completion() for index in sorted(self.others)),
            "".join(self.thoughts),
            tuple(self.calls[index] for index in sorted(self.calls)),
        )

    def _add_calls(self, deltas: str) -> None:
        for delta in json.loads(deltas):
            index, arguments = delta["index"], delta["arguments"]
            known = self.calls.get(index)
            if known is None:
                self.calls[index] = ToolCall(delta["id"], delta["name"], arguments)
            else:
                self.calls[index] = replace(known, arguments=known.arguments + arguments)
