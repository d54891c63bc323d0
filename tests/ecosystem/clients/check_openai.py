"""OpenAI's Python client against the real server: what it parses, retries and raises."""

import asyncio
import json
import time
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    size: Literal["small", "large"]


@pytest.fixture(scope="session")
def client(base_url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)


def test_models(client: openai.OpenAI, model: str) -> None:
    assert model in [entry.id for entry in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_chat(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 32}
    whole = client.chat.completions.create(**options, temperature=0)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    with client.chat.completions.create(
        **options, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole._request_id


def test_chat_stream_helper(client: openai.OpenAI, model: str) -> None:
    """The client's own accumulator, with all that it checks on the way."""
    with client.chat.completions.stream(
        model=model, messages=QUESTION, max_tokens=24, temperature=0, logprobs=True, top_logprobs=2
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert "Paris" in (final.choices[0].message.content or "")
    assert final.choices[0].logprobs is not None
    tokens = final.choices[0].logprobs.content or []
    assert "".join(token.token for token in tokens).startswith(
        final.choices[0].message.content or "-"
    )


def test_parse(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=City, max_tokens=96, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model=model, messages=QUESTION, response_format=City, max_tokens=96, temperature=0
    ) as stream:
        for _ in stream:
            pass
    assert stream.get_final_completion().choices[0].message.parsed == (
        answer.choices[0].message.parsed
    )


def test_parse_cut_short(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=QUESTION, response_format=City, max_tokens=3
        )


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_tools(client: openai.OpenAI, model: str, choice: Any) -> None:
    options: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,  # how often a small model calls differs between machines
        "temperature": 0,
        "max_tokens": 96,
    }
    answer = client.chat.completions.create(**options)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"city"}
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    messages = [
        *options["messages"],
        answer.choices[0].message,  # as it came, with every field that the client keeps
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 20}'},
    ]
    after = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=32
    )
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_parse_tools(client: openai.OpenAI, model: str) -> None:
    class GetWeather(BaseModel):
        """The weather of a city"""

        city: str = Field(max_length=20)

    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Weather in Paris?"}],
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=96,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_completions(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(
        **options, prompt=["The capital of France is", "1, 2, 3,"], echo=True, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    first = answer.choices[0]
    assert first.text.startswith("The capital of France is")
    assert first.logprobs is not None
    assert first.logprobs.token_logprobs is not None
    assert first.logprobs.token_logprobs[0] is None
    assert "".join(first.logprobs.tokens or []) == first.text
    ids = client.completions.create(**options, prompt=[504, 3575, 282])
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_embeddings(client: openai.OpenAI, model: str) -> None:
    """Without a format the client asks for base64 and decodes it."""
    texts = ["A cat sits.", "Eine Katze sitzt."]
    answer = client.embeddings.create(model=model, input=texts)
    assert [entry.index for entry in answer.data] == [0, 1]
    assert sum(value**2 for value in answer.data[0].embedding) == pytest.approx(1, abs=1e-3)
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert plain.data[1].embedding == pytest.approx(answer.data[1].embedding)
    small = client.embeddings.create(model=model, input=texts[0], dimensions=32)
    assert len(small.data[0].embedding) == 32


def test_responses(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 32}
    first = client.responses.create(input="What is the capital of France?", **options)
    assert "Paris" in first.output_text
    with client.responses.stream(
        input="And of Italy?", previous_response_id=first.id, **options
    ) as stream:
        kinds = [event.type for event in stream]
        second = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert second.output_text
    again = client.responses.retrieve(second.id)
    assert again.output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_responses_parse_and_tools(client: openai.OpenAI, model: str) -> None:
    parsed = client.responses.parse(
        model=model,
        input="What is the capital of France?",
        text_format=City,
        max_output_tokens=96,
        temperature=0,
    )
    assert isinstance(parsed.output_parsed, City)
    tool: Any = {"type": "function", **WEATHER["function"]}
    turn: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    called = client.responses.create(
        model=model,
        input=turn,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=96,
        temperature=0,
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city"}
    turn += called.output
    turn += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    after = client.responses.create(model=model, input=turn, tools=[tool], max_output_tokens=16)
    assert after.output


def test_images(client: openai.OpenAI, picture_model: str, picture: str) -> None:
    parts: list[Any] = [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": picture, "detail": "auto"}},
    ]
    answer = client.chat.completions.create(
        model=picture_model, messages=[{"role": "user", "content": parts}], max_tokens=4
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 16, "the image's tokens count"
    parts = [
        {"type": "input_text", "text": "what"},
        {"type": "input_image", "image_url": picture, "detail": "auto"},
    ]
    response = client.responses.create(
        model=picture_model, input=[{"role": "user", "content": parts}], max_output_tokens=4
    )
    assert response.usage is not None
    assert response.usage.input_tokens == answer.usage.prompt_tokens


def test_errors(client: openai.OpenAI, model: str, base_url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature"
    assert "temperature" in bad.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0).models.list()


def test_retries_when_told_to_wait(client: openai.OpenAI, model: str, limited_key: str) -> None:
    limited = client.with_options(api_key=limited_key)
    ask: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 1}
    refused = None
    for _ in range(40):
        try:
            limited.chat.completions.create(**ask)
        except openai.RateLimitError as error:
            refused = error
            break
    assert refused is not None, "the limit was never met"
    assert 0 < int(refused.response.headers["retry-after"]) <= 3
    started = time.monotonic()
    answer = limited.with_options(max_retries=2).chat.completions.create(**ask)
    assert answer.choices
    assert time.monotonic() - started > 0.2, "it waited"


def test_a_stream_may_be_left(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=400, stream=True
    ) as stream:
        next(iter(stream))


def test_async(base_url: str, key: str, model: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
            ask = client.chat.completions.create
            options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 16}
            answers = await asyncio.gather(*(ask(messages=QUESTION, **options) for _ in range(8)))
            texts = [answer.choices[0].message.content or "" for answer in answers]
            stream = await ask(messages=QUESTION, stream=True, **options)
            texts.append("".join([c.choices[0].delta.content or "" async for c in stream]))
            return texts

    assert len(set(asyncio.run(run()))) == 1
