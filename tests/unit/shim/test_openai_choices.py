"""Several prompts in a request, and several choices of each."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from fake_pieces import Piece, Request, endless
from fake_triton import MODEL, FakeModel
from shim_calls import CHAT, COMPLETIONS, MESSAGES, chat, completion, events, refusal


def test_several_prompts(http: httpx.Client, model: FakeModel) -> None:
    def by_prompt(request: Request) -> Iterator[Piece]:
        text = request.inputs.get("text_input") or str(request.inputs["input_ids"])
        yield Piece(text, 2)
        yield Piece("!", 1, "stop")

    model.script = by_prompt
    body = completion(prompt=["one", "two", "three"])
    answer = http.post(COMPLETIONS, json=body).json()
    choices = [(item["index"], item["text"]) for item in answer["choices"]]
    assert choices == [(0, "one!"), (1, "two!"), (2, "three!")]
    assert answer["usage"]["completion_tokens"] == 9
    body = completion(prompt=[[1, 2], [3]], stream=True, stream_options={"include_usage": True})
    received = events(http, COMPLETIONS, body)
    texts = {0: "", 1: ""}
    finishes = []
    for chunk in received[:-2]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        finishes += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "[1, 2]!", 1: "[3]!"}
    assert sorted(finishes) == [0, 1]
    assert received[-2]["usage"]["prompt_tokens"] == 3


def test_one_refused_prompt_refuses_all(http: httpx.Client, model: FakeModel) -> None:
    def refuse_second(request: Request) -> Iterator[Piece]:
        if request.inputs["text_input"] == "b":
            return iter([Piece(error={"message": "no", "status": 400, "param": "prompt"})])
        return endless(request)

    model.script = refuse_second
    refusal(http.post(COMPLETIONS, json=completion(prompt=["a", "b"], stream=True)), 400, "prompt")
    (first,) = [item for item in model.requests if item.inputs["text_input"] == "a"]
    assert first.cancelled.wait(10)


def choice_text(index: int, count: int) -> str:
    return "".join(f"c{index}w{step} " for step in range(count))


def test_choices_of_a_chat(client: openai.OpenAI, model: FakeModel) -> None:
    model.num_cached_tokens = 1
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [choice_text(index, 2 + index) for index in range(3)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    (request,) = model.requests
    assert request.sampling["n"] == 3
    assert answer.usage is not None
    prompt_tokens = len(request.inputs["messages"].split())
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 2 + 3 + 4
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_streamed_choices_of_a_chat(client: openai.OpenAI, model: FakeModel) -> None:
    texts, reasons, usages = ["", "", ""], {}, []
    with client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=2,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                assert choice.index not in reasons, "a choice goes on after its end"
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    assert texts == [choice_text(index, 2 + index) for index in range(3)]
    assert reasons == dict.fromkeys(range(3), "length")
    assert [usage.completion_tokens for usage in usages] == [9]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts(client: openai.OpenAI, model: FakeModel, stream: bool) -> None:
    texts: dict[int, str] = {}
    prompts = ["a b", "c"]
    if stream:
        with client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=2, n=2, stream=True
        ) as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + choice.text
    else:
        answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=2, n=2)
        texts = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
        assert answer.usage.completion_tokens == 2 * (2 + 3)
    expected = [choice_text(index, 2 + index) for index in range(2)] * 2
    assert texts == dict(enumerate(expected))


def test_prompts_of_one_request_say_how_many_they_are(http: httpx.Client, model: FakeModel) -> None:
    for prompt, told in ((["a", "b", "c"], 3), (["a"], None), ("a", None)):
        model.requests.clear()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert {request.parameters.get("num_prompts") for request in model.requests} == {told}


def test_the_choices_of_all_prompts_are_bounded(http: httpx.Client, model: FakeModel) -> None:
    body = completion(prompt=["a"] * 10, n=13)
    error = refusal(http.post(COMPLETIONS, json=body), 400, "n")
    assert "12" in error["message"]
    assert not model.requests


def test_one_choice_asked_for_by_number_is_a_request_for_one(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=chat(n=1, max_tokens=2)).json()
    assert answer["choices"][0]["message"]["content"] == "w0 w1 "
