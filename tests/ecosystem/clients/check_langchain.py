"""langchain-openai against the real server."""

import asyncio
from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city"""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


@tool
def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """The weather of a city"""
    return f"sunny in {city}"


@pytest.fixture(scope="session")
def options(base_url: str, key: str, model: str) -> dict[str, Any]:
    return {"base_url": base_url, "api_key": key, "model": model, "temperature": 0}


@pytest.fixture(scope="session")
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**options, max_tokens=64)


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke([SystemMessage("Be short."), HumanMessage(QUESTION)])
    assert "Paris" in answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream(chat: ChatOpenAI) -> None:
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.content == chat.invoke(QUESTION).content
    assert whole.usage_metadata is not None


def test_batch_and_async(chat: ChatOpenAI) -> None:
    answers = chat.batch([QUESTION] * 4)
    assert len({answer.content for answer in answers}) == 1

    async def run() -> str:
        return "".join([chunk.text async for chunk in chat.astream(QUESTION)])

    assert asyncio.run(run()) == answers[0].content


def test_a_conversation_goes_on(chat: ChatOpenAI) -> None:
    first = chat.invoke(QUESTION)
    after = chat.invoke([HumanMessage(QUESTION), first, HumanMessage("And of Italy?")])
    assert after.content


@pytest.mark.parametrize("choice", ["any", "get_weather", "auto"])
def test_bind_tools(chat: ChatOpenAI, choice: str) -> None:
    bound = chat.bind_tools(
        [get_weather], tool_choice=choice, strict=True, parallel_tool_calls=False
    )
    question = HumanMessage("Weather in Paris?")
    answer = bound.invoke([question])
    assert isinstance(answer, AIMessage)
    if choice == "auto":
        return
    assert len(answer.tool_calls) == 1, answer
    call = answer.tool_calls[0]
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    after = chat.bind_tools([get_weather]).invoke([question, answer, result])
    assert isinstance(after, AIMessage)
    chunks = list(bound.stream([question]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert [(item["name"], item["args"]) for item in whole.tool_calls] == [
        (call["name"], call["args"])
    ]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, True])
def test_with_structured_output(chat: ChatOpenAI, method: Any, strict: bool | None) -> None:
    parser = chat.with_structured_output(City, method=method, strict=strict)
    assert isinstance(parser.invoke(QUESTION), City)


def test_responses_api(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(**options, max_tokens=32, use_responses_api=True)
    first = chat.invoke(QUESTION)
    assert "Paris" in first.text
    after = chat.invoke([HumanMessage(QUESTION), first, HumanMessage("And of Italy?")])
    assert after.text
    streamed = "".join(chunk.text for chunk in chat.stream(QUESTION))
    assert streamed == first.text
    called = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke(
        "Weather in Paris?"
    )
    assert [call["name"] for call in called.tool_calls] == ["get_weather"], called
    following = ChatOpenAI(
        **options, max_tokens=16, use_responses_api=True, use_previous_response_id=True
    )
    assert following.invoke([HumanMessage(QUESTION), first, HumanMessage("And of Italy?")]).text


def test_logprobs_and_choices(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(**options, max_tokens=4, logprobs=True, top_logprobs=2, n=2)
    result = chat.generate([[HumanMessage(QUESTION)]])
    assert len(result.generations[0]) == 2
    assert result.generations[0][0].message.response_metadata["logprobs"]["content"]


def test_completions(options: dict[str, Any]) -> None:
    llm = OpenAI(**options, max_tokens=8)
    answer = llm.invoke("The capital of France is")
    assert "Paris" in answer
    assert "".join(llm.stream("The capital of France is")) == answer
    assert llm.batch(["The capital of France is"] * 2) == [answer, answer]


def test_embeddings(base_url: str, key: str, model: str) -> None:
    """Without the length check, with which it sends tokens of OpenAI's vocabulary, not text."""
    options: dict[str, Any] = {"base_url": base_url, "api_key": key, "model": model}
    found = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    vectors = found.embed_documents(["A cat sits.", "Eine Katze sitzt."])
    assert len(vectors) == 2
    assert found.embed_query("A cat sits.") == pytest.approx(vectors[0], abs=1e-6)


def test_images(base_url: str, key: str, picture_model: str, picture: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key=key, model=picture_model, max_tokens=4)
    data = picture.partition(",")[2]
    for part in (
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"},
        {"type": "image", "base64": data, "mime_type": "image/png"},
    ):
        message = HumanMessage([{"type": "text", "text": "what"}, part])
        assert chat.invoke([message]).usage_metadata["input_tokens"] > 16
