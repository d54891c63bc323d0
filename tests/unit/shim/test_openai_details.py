"""What an answer holds beside its text: log-probabilities, the prompt, calls of tools."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_pieces import Piece, Request
from fake_triton import MODEL, FakeModel
from shim_calls import CHAT, COMPLETIONS, MESSAGES, chat, completion


def scored(request: Request) -> Iterator[Piece]:
    """ "né" in three tokens, the middle one half a character, then the end."""
    tokens = [("n", [110], -0.25, 1), ("", [195], -1.5, None), ("é", [169], -0.5, 2)]
    for index, (text, raw, logprob, rank) in enumerate(tokens):
        entry = {str(raw[0]): candidate(text, raw, logprob, rank)}
        if rank != 1:
            entry["120"] = candidate("x", [120], -0.125, 1)
        yield Piece(text, logprobs=(entry,), finish_reason="length" if index == 2 else None)


def candidate(text: str, raw: list[int], logprob: float | None, rank: int | None) -> dict[str, Any]:
    return {"decoded_token": text, "bytes": raw, "logprob": logprob, "rank": rank}


def test_chat_logprobs_with_the_official_client(client: openai.OpenAI, model: FakeModel) -> None:
    model.script = scored
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    assert model.requests[0].sampling == {"logprobs": 2}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(item.token, item.bytes, item.logprob) for item in logprobs.content] == [
        ("n", [110], -0.25),
        ("", [195], -1.5),
        ("é", [169], -0.5),
    ]
    tops = [[item.token for item in entry.top_logprobs] for entry in logprobs.content]
    assert tops == [["n"], ["x"], ["x", "é"]]
    streamed = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, stream=True
    )
    entries = [
        item
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs is not None
        for item in choice.logprobs.content or []
    ]
    assert [(item.token, item.logprob) for item in entries] == [
        ("n", -0.25),
        ("", -1.5),
        ("é", -0.5),
    ]
    assert model.requests[1].sampling == {"logprobs": 0}


def test_completion_logprobs_with_the_official_client(
    client: openai.OpenAI, model: FakeModel
) -> None:
    model.script = scored
    whole = client.completions.create(model=MODEL, prompt="a", logprobs=2).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens == ["n", "", "é"]
    assert whole.logprobs.token_logprobs == [-0.25, -1.5, -0.5]
    assert whole.logprobs.text_offset == [0, 1, 1]
    assert whole.logprobs.top_logprobs == [
        {"n": -0.25},
        {"x": -0.125, "": -1.5},
        {"x": -0.125, "é": -0.5},
    ]
    streamed = client.completions.create(model=MODEL, prompt="a", logprobs=0, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [offset for part in parts for offset in part.text_offset or []] == [0, 1, 1]


def echoing(request: Request) -> Iterator[Piece]:
    entries = ({"97": candidate("a", [97], None, None)}, {"98": candidate("b", [98], -2.0, 1)})
    yield Piece("ab", num_tokens=0, prompt_logprobs=entries)
    entry = {"110": candidate("n", [110], -0.25, 1)}
    yield Piece("n", logprobs=(entry,), finish_reason="length")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_and_its_logprobs_first(
    client: openai.OpenAI, model: FakeModel, stream: bool
) -> None:
    model.script = echoing
    answer = client.completions.create(
        model=MODEL, prompt="ab", echo=True, logprobs=1, max_tokens=1, stream=stream
    )
    chunks = list(answer) if stream else [answer]
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == "abn"
    logprobs = [part.logprobs for part in parts if part.logprobs]
    assert [token for part in logprobs for token in part.tokens or []] == ["a", "b", "n"]
    values = [value for part in logprobs for value in part.token_logprobs or []]
    assert values == [None, -2.0, -0.25]
    tops = [item for part in logprobs for item in part.top_logprobs or []]
    assert tops == [None, {"b": -2.0}, {"n": -0.25}]
    assert [at for part in logprobs for at in part.text_offset or []] == [0, 1, 2]
    (request,) = model.requests
    assert request.inputs["exclude_input_in_output"] is False
    assert request.sampling == {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}


def calling(request: Request) -> Iterator[Piece]:
    first = {"index": 0, "id": "call_1", "name": "f", "arguments": ""}
    more = {"index": 0, "id": None, "name": None}
    second = {"index": 1, "id": "call_2", "name": "g", "arguments": "{}"}
    yield Piece("So: ")
    yield Piece(tool_calls=(first, {**more, "arguments": '{"a"'}))
    yield Piece(tool_calls=({**more, "arguments": ": 1}"}, second))
    yield Piece(finish_reason="tool_calls")


TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]


def test_tool_calls_with_the_official_client(client: openai.OpenAI, model: FakeModel) -> None:
    model.script = calling
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    choice = client.chat.completions.create(**asked, tool_choice="auto").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So: "
    whole = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert whole == [("call_1", "f", '{"a": 1}'), ("call_2", "g", "{}")]
    assert model.requests[0].sampling == {"tools": TOOLS, "tool_choice": "auto"}
    calls: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                assert call.type == "function"
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments
    assert [tuple(call) for call in calls.values()] == whole


def test_a_message_that_only_calls_has_no_content(http: httpx.Client, model: FakeModel) -> None:
    model.script = lambda request: iter(list(calling(request))[1:])
    message = http.post(CHAT, json=chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


def test_without_logprobs_none_are_asked_for(http: httpx.Client, model: FakeModel) -> None:
    model.script = scored
    answer = http.post(CHAT, json=chat(logprobs=False)).json()
    assert answer["choices"][0]["logprobs"] is None
    assert "return_logprobs" not in model.requests[0].inputs


def test_what_structures_the_output_goes_to_the_backend(
    http: httpx.Client, model: FakeModel
) -> None:
    formats = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}
    assert http.post(CHAT, json=chat(response_format=formats)).status_code == 200
    assert http.post(COMPLETIONS, json=completion(guided_choice=["a", "b"])).status_code == 200
    assert model.requests[0].sampling == {"response_format": formats}
    assert model.requests[1].sampling == {"guided_choice": ["a", "b"]}
