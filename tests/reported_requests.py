"""What the requests of users' reports about other servers are made of."""

from typing import Any

VLLM = "https://github.com/vllm-project/vllm/"
LLAMA_CPP = "https://github.com/ggml-org/llama.cpp/"
TGI = "https://github.com/huggingface/text-generation-inference/"

MEASURE = {
    "type": "object",
    "properties": {
        "ratio": {"type": "number", "minimum": 0.25, "maximum": 2.5},
        "code": {"enum": ["ZSJB39"]},
    },
    "required": ["code", "ratio"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": MEASURE}}
FORCED = {
    "messages": "Measure it.",
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 90,
}
PAIR = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
COUNT = "1, 2, 3, 4, 5,"
EMOJI = "Answer only 🤗👩\u200d👩\u200d👧 你好"
ESCAPED = r"^hello there indeed\\!$"
NAME = "my name is Bo"
ASK_NAME = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": [{"type": "text", "text": NAME}]},
    {"role": "user", "content": "What is your name?"},
]
CALL = {"name": "measure", "arguments": '{"code": "ZSJB39", "ratio": 1}'}
ROUND_TRIP = [
    {"role": "user", "content": "Measure it."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "It is 7."},
]


def changed(messages: list[dict[str, Any]], index: int, **fields: Any) -> list[dict[str, Any]]:
    return [item | fields if place == index else item for place, item in enumerate(messages)]


def as_schema(schema: dict[str, Any]) -> dict[str, Any]:
    wrapper = {"name": "x", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": wrapper}
