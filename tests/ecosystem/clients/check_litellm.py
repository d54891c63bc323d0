"""litellm against the real server, as an OpenAI-compatible provider."""

import asyncio
import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)


@pytest.fixture(scope="session", params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, base_url: str, key: str, model: str) -> dict[str, Any]:
    """By either of the providers that take an address."""
    return {"model": f"{request.param}/{model}", "api_base": base_url, "api_key": key}


def test_completion(options: dict[str, Any]) -> None:
    options = {**options, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = litellm.completion(**options)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    chunks = list(
        litellm.completion(**options, stream=True, stream_options={"include_usage": True})
    )
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens

    async def run() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**options) for _ in range(4)))
        stream = await litellm.acompletion(**options, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return [text, *(answer.choices[0].message.content for answer in answers)]

    assert set(asyncio.run(run())) == {whole.choices[0].message.content}


def test_tools_and_what_follows(options: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    ask = {**options, "tools": [WEATHER], "temperature": 0, "max_tokens": 96}
    ask |= {"parallel_tool_calls": False}
    answer = litellm.completion(**ask, messages=messages, tool_choice="required")
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}
    chunks = list(litellm.completion(**ask, messages=messages, tool_choice="required", stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert litellm.completion(**ask, messages=messages).choices


def test_response_format(options: dict[str, Any]) -> None:
    answer = litellm.completion(
        **options, messages=QUESTION, response_format=City, max_tokens=64, temperature=0
    )
    City.model_validate_json(answer.choices[0].message.content)


def test_responses(options: dict[str, Any]) -> None:
    ask = {**options, "temperature": 0, "max_output_tokens": 32}
    answer = litellm.responses(**ask, input="What is the capital of France?")
    assert "Paris" in answer.output_text
    kinds = [
        event.type for event in litellm.responses(**ask, input="What is 1 and 1?", stream=True)
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_embedding(options: dict[str, Any]) -> None:
    answer = litellm.embedding(**options, input=["A cat sits.", "A dog barks."])
    assert len(answer.data) == 2


def test_text_completion(options: dict[str, Any]) -> None:
    ask = {**options, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = litellm.text_completion(**ask)
    assert "Paris" in answer.choices[0].text
    streamed = litellm.text_completion(**ask, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == answer.choices[0].text


def test_errors(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**options, messages=QUESTION, temperature=9)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**options, "model": "openai/nope"}, messages=QUESTION)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**options, "api_key": "sk-wrong"}, messages=QUESTION)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options, messages=[{"role": "user", "content": "word " * 9000}])
