"""What a reply of the OpenAI endpoint must be: checks to name in a table of requests."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
from openai_calls import Reply
from reported_requests import MEASURE

Check = Callable[[Reply], None]


def ends_with(reason: str) -> Check:
    def check(reply: Reply) -> None:
        assert {choice.finish_reason for choice in reply.choices} == {reason}

    return check


def is_cut_at(*stops: str) -> Check:
    """The twin has no stop strings: of its text, what precedes the first must be there."""

    def check(reply: Reply) -> None:
        assert reply.only.finish_reason == "stop"
        assert not any(stop in reply.only.text for stop in stops)

    return check


def has_tokens(low: int, high: int) -> Check:
    def check(reply: Reply) -> None:
        if not is_streamed(reply):
            assert low <= reply.usage["completion_tokens"] <= high

    return check


def spells_its_tokens(reply: Reply) -> None:
    for choice in reply.choices:
        tokens = choice.tokens or [entry["token"] for entry in choice.logprobs]
        assert tokens
        assert "".join(tokens) == choice.text
        starts = [len("".join(tokens[:index])) for index in range(len(tokens))]
        assert choice.text_offset in ([], starts)


def has_no_alternatives(reply: Reply) -> None:
    spells_its_tokens(reply)
    assert all(entry["top_logprobs"] == [] for entry in reply.only.logprobs)


def has_usage_once_at_the_end(reply: Reply) -> None:
    *others, last = reply.chunks
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0
    assert [chunk["usage"] for chunk in others] == [None] * len(others)


def has_no_usage(reply: Reply) -> None:
    assert not any("usage" in chunk for chunk in reply.chunks)


def calls_validly(reply: Reply) -> None:
    choice = reply.only
    assert (choice.finish_reason, choice.text) == ("tool_calls", "")
    for name, arguments in choice.calls:
        assert name == "measure"
        jsonschema.validate(json.loads(arguments), MEASURE)


def never_calls_half(reply: Reply) -> None:
    choice = reply.only
    if choice.finish_reason == "tool_calls":
        calls_validly(reply)
    elif not is_streamed(reply):
        tokens = reply.usage["completion_tokens"]
        assert choice.finish_reason == "length"
        assert tokens in (8, 16, 24, 40)


def is_stopped_in_its_call(reply: Reply) -> None:
    choice = reply.only
    assert choice.finish_reason == "stop"
    assert choice.calls[0][1].endswith('"')
    assert "ZSJB39" not in choice.calls[0][1]


def follows(schema: dict[str, Any]) -> Check:
    def check(reply: Reply) -> None:
        for choice in reply.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), schema)

    return check


def matches(pattern: str) -> Check:
    def check(reply: Reply) -> None:
        assert re.fullmatch(pattern, reply.only.text)

    return check


def is_answered(reply: Reply) -> None:
    assert all(choice.finish_reason in ("stop", "length") for choice in reply.choices)


def all_of(*checks: Check) -> Check:
    def check(reply: Reply) -> None:
        for item in checks:
            item(reply)

    return check


def is_streamed(reply: Reply) -> bool:
    return "chunk" in reply.chunks[0]["object"] or not reply.chunks[0].get("usage")
