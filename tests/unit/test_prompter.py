"""Prompts and their parts: tokenising, how a chat's prompt ends, thoughts before the answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import BOS, EOS, make_tokenizer
from transformers import PreTrainedTokenizerFast

from shoal.backend.intake import Intake
from shoal.backend.raw_request import RawRequest
from shoal.backend.text.chat_messages import parse_messages
from shoal.backend.text.chat_template import ChatTemplate
from shoal.backend.text.output_processor import OutputProcessor
from shoal.backend.text.reasoning import ReasoningParser
from shoal.backend.text.template_options import TemplateOptions, take_template_options
from shoal.backend.text_ops import TextRequest
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sampled_token import SampledToken
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% if not enable_thinking|default(true) %}</think>"
    "{% endif %}{% endif %}"
)


def make_intake(add_bos: bool = False, **more: Any) -> Intake:
    tokenizer = make_tokenizer(add_bos, **more)
    return Intake(tokenizer, ChatTemplate.from_tokenizer(tokenizer), 64, 300)


def tokenize(intake: Intake, raw: RawRequest, **control: Any) -> dict[str, Any]:
    request = TextRequest.from_control(json.dumps({"op": "tokenize", **control}))
    assert request is not None
    return request.answer(intake, raw)


def test_tokenize_text() -> None:
    intake = make_intake(add_bos=True)
    raw = RawRequest(text_input="aé</s>")
    answer = tokenize(intake, raw, return_token_strs=True)
    assert answer["tokens"] == [BOS, *"aé".encode(), EOS]
    assert answer["token_strs"] == ["<s>", "a", "\ufffd", "\ufffd", "</s>"]
    assert (answer["count"], answer["max_model_len"]) == (5, 64)
    assert tokenize(intake, raw, add_special_tokens=False)["tokens"] == answer["tokens"][1:]
    long = tokenize(intake, RawRequest(text_input="x" * 1000))  # counted, not run
    assert long["count"] == 1001


def test_tokenize_a_chat_is_what_would_run() -> None:
    intake = make_intake()
    raw = RawRequest(messages=json.dumps(CHAT[:1]))
    assert tokenize(intake, raw)["tokens"] == intake.prepare(raw).prompt_token_ids
    options = json.dumps({"add_generation_prompt": False})
    shorter = RawRequest(messages=json.dumps(CHAT[:1]), sampling_parameters=options)
    full = intake.prompter.detokenize(RawRequest(input_ids=tokenize(intake, raw)["tokens"]))
    less = intake.prompter.detokenize(RawRequest(input_ids=tokenize(intake, shorter)["tokens"]))
    assert full == less + "[assistant] "


def test_text_requests_are_refused_by_name() -> None:
    intake = make_intake()
    for raw, param in (
        (RawRequest(), "text_input"),
        (RawRequest(input_ids=[1]), "input_ids"),
        (RawRequest(text_input="a", parameters={"temperature": 1}), "temperature"),
    ):
        with pytest.raises(RequestError) as refused:
            tokenize(intake, raw)
        assert refused.value.param == param
    detokenize = TextRequest("detokenize")
    for raw in (RawRequest(text_input="a"), RawRequest(input_ids=[300])):
        with pytest.raises(RequestError):
            detokenize.answer(intake, raw)
    assert detokenize.answer(intake, RawRequest(input_ids=[104, 105])) == {"prompt": "hi"}
    with pytest.raises(RequestError, match="more"):
        TextRequest.from_control('{"op": "tokenize", "more": true}')
    assert TextRequest.from_control('{"op": "status"}') is None


def test_an_embedding_has_at_most_the_models_dimensions() -> None:
    tokenizer = make_tokenizer()
    intake = Intake(tokenizer, None, 64, 300, {"max_tokens": 5}, hidden_size=32)

    def prepare(dimensions: int) -> SamplingParams:
        text = json.dumps({"pooling": "mean", "dimensions": dimensions})
        return intake.prepare(RawRequest(text_input="a", sampling_parameters=text)).sampling

    assert prepare(32).max_tokens == 0  # the defaults are about text
    with pytest.raises(RequestError) as refused:
        prepare(33)
    assert refused.value.param == "dimensions"


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("content", ["b", "b ", "b</s> x  ", " <s>b\n"])
def test_continuing_equals_transformers(tmp_path: Path, trims: bool, content: str) -> None:
    said = "m['content'] | trim" if trims else "m['content']"
    source = "{% for m in messages %}[{{ m['role'] }}]{{ " + said + " }}<end>{% endfor %}"
    tokenizer = make_tokenizer(chat_template=source)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=source)
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    rendered = ChatTemplate(source, tokenizer).render(
        parse_messages(chat), options=TemplateOptions(False, True)
    )
    expected = oracle.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert rendered.text == expected
    assert tokenizer.decode(rendered.encode(tokenizer)) == expected


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"chat_template_kwargs": {"enable_thinking": "no"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": {"date_string": "<s>"}}, "chat_template_kwargs.date_string"),
    ],
)
def test_template_options_are_checked(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        take_template_options(values)
    assert refused.value.param == param


def test_options_need_messages_and_an_assistant() -> None:
    intake = make_intake()
    options = json.dumps({"continue_final_message": True})
    for raw in (
        RawRequest(text_input="a", sampling_parameters=options),
        RawRequest(messages=json.dumps(CHAT[:1]), sampling_parameters=options),
    ):
        with pytest.raises(RequestError):
            intake.prepare(raw)
    raw = RawRequest(messages=json.dumps(CHAT), sampling_parameters=options)
    prepared = intake.prepare(raw)
    assert prepared.prompt_text.endswith("[assistant] b ")


def test_who_thinks() -> None:
    intake = make_intake(chat_template=THINKING)

    def start(**values: Any) -> bool | None:
        text = json.dumps(values)
        raw = RawRequest(messages=json.dumps(CHAT[:1]), sampling_parameters=text)
        return intake.prepare(raw).starts_in_thought

    assert start() is True
    assert start(chat_template_kwargs={"enable_thinking": False}) is False
    assert start(add_generation_prompt=False) is False
    assert start(guided_choice=["a"]) is None
    assert intake.prepare(RawRequest(text_input="<think>")).starts_in_thought is None
    assert make_intake().prepare(RawRequest(messages=json.dumps(CHAT))).starts_in_thought is None


def part(text: str, is_inside: bool, cuts: list[int]) -> tuple[str, str]:
    parser = ReasoningParser(is_inside)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [parser.push(text[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    parts.append(parser.flush())
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("text", "is_inside", "thoughts", "answer"),
    [
        ("<think>\nhm m\n</think>\n\nyes ", False, "hm m", "yes "),
        ("\n <think>hm</think>yes", False, "hm", "yes"),
        ("hm</think> yes</think>", True, "hm", "yes</think>"),
        ("\nhm < </thin", True, "hm < </thin", ""),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("\n\n yes", False, "", "\n\n yes"),
        ("<thin", False, "", "<thin"),
        ("<think></think>", False, "", ""),
        ("", True, "", ""),
    ],
)
@given(cuts=st.lists(st.integers(0, 40), max_size=30))
def test_thoughts_are_parted_however_they_come(
    text: str, is_inside: bool, thoughts: str, answer: str, cuts: list[int]
) -> None:
    assert part(text, is_inside, cuts) == (thoughts, answer)


def test_thoughts_of_an_output() -> None:
    processor = OutputProcessor(
        make_tokenizer(), SamplingParams(max_tokens=50), None, ReasoningParser(True)
    )
    deltas = [processor.push(SampledToken(byte)) for byte in b"hm </think>\nok"]
    deltas.append(processor.push(None, FinishReason.LENGTH))
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.text for delta in deltas) == "ok"


def test_a_prompt_that_comes_again_has_the_same_ids() -> None:
    intake = make_intake()
    text = RawRequest(text_input="<|im_start|>user\nHi")
    chat = RawRequest(messages=json.dumps([{"role": "user", "content": "Hi <|im_end|>"}]))
    for raw in (text, chat):
        first, again = (intake.prepare(raw).prompt_token_ids for _ in range(2))
        assert first == again == intake.prepare(raw, b"another").prompt_token_ids
        assert first is not again
