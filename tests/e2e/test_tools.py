"""Calls of tools by a model that could hardly make one itself."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from served import Served

MODEL = "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def asking(tool_choice: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": TOOLS,
        "tool_choice": tool_choice,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 300,
        **more,
    }


def streamed(client: openai.OpenAI, **request: Any) -> tuple[list[tuple[str, str]], str | None]:
    calls: list[list[str]] = []
    reason = None
    for chunk in client.chat.completions.create(**request, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                calls.append([call.function.name, ""])
            calls[-1][1] += call.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    return [(name, arguments) for name, arguments in calls], reason


@pytest.fixture
def client(served: Served) -> Any:
    with openai.OpenAI(base_url=f"{served.openai_url}/v1", api_key="none") as made:
        yield made


@pytest.mark.parametrize("tool_choice", [NAMED, "required"])
def test_a_forced_call_is_valid_streamed_and_not(client: openai.OpenAI, tool_choice: Any) -> None:
    request = asking(tool_choice, parallel_tool_calls=False)
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    if call.function.name == "get_weather":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    same, reason = streamed(client, **request)
    assert same == [(call.function.name, call.function.arguments)]
    assert reason == "tool_calls"


@pytest.mark.parametrize("max_tokens", [4, 12, 20])
def test_a_cut_call_ends_for_its_length(client: openai.OpenAI, max_tokens: int) -> None:
    request = asking(NAMED, max_tokens=max_tokens)
    whole = client.chat.completions.create(**request).choices[0]
    assert whole.finish_reason == "length"
    _, reason = streamed(client, **request)
    assert reason == "length"


def test_tools_may_be_ignored_and_wrong_ones_are_refused(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**asking("none", max_tokens=5)).choices[0]
    assert choice.message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        client.chat.completions.create(
            **asking({"type": "function", "function": {"name": "other"}})
        )
