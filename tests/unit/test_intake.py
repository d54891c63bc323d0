import contextlib
import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import BOS, TURN_END, make_tokenizer

from shoal.backend.intake import MAX_PROMPT_BYTES, Intake, PreparedRequest, RawRequest
from shoal.backend.text.chat_template import ChatTemplate
from shoal.backend.text.tokenizer import Tokenizer
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sampling_params import MAX_SEED, SamplingParams

MAX_MODEL_LEN = 128
VOCAB_SIZE = 300  # padded beyond the tokeniser's 259


def make_intake(
    tokenizer: Tokenizer | None = None, defaults: dict[str, Any] | None = None
) -> Intake:
    tokenizer = tokenizer or make_tokenizer(add_bos=True)
    template = ChatTemplate.from_tokenizer(tokenizer)
    return Intake(tokenizer, template, MAX_MODEL_LEN, VOCAB_SIZE, defaults)


INTAKE = make_intake()
TOKENIZER = make_tokenizer()
CHAT = '[{"role": "user", "content": "hi"}]'


def prepare(**tensors: Any) -> PreparedRequest:
    return INTAKE.prepare(RawRequest(**tensors))


def with_sampling(text: str) -> PreparedRequest:
    return prepare(text_input="hi", sampling_parameters=text)


def refused(**tensors: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(**tensors)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("text", ["hi", b"hi"])
def test_text_prompt(text: str | bytes) -> None:
    request = prepare(text_input=text)
    assert request.prompt_token_ids == [BOS, *b"hi"]
    assert request.prompt_text == "hi"


def test_messages_prompt_has_no_bos_but_the_templates() -> None:
    request = prepare(messages=CHAT)
    assert request.prompt_text == "<s>[user] hi<end>[assistant] "
    assert request.prompt_token_ids == [BOS, *b"[user] hi", TURN_END, *b"[assistant] "]


def test_token_ids_prompt_is_taken_as_it_is() -> None:
    assert prepare(input_ids=[104, 299]).prompt_token_ids == [104, 299]


def test_max_tokens_and_seed_are_filled_in() -> None:
    sampling = prepare(input_ids=[1, 2, 3]).sampling
    assert sampling.max_tokens == MAX_MODEL_LEN - 3
    assert sampling.seed is not None
    assert 0 <= sampling.seed <= MAX_SEED
    assert sampling.seed != prepare(input_ids=[1, 2, 3]).sampling.seed


def test_given_max_tokens_and_seed_stay() -> None:
    sampling = with_sampling('{"max_tokens": 5, "seed": 0}').sampling
    assert (sampling.max_tokens, sampling.seed) == (5, 0)


def test_null_max_tokens_is_as_if_absent() -> None:
    assert with_sampling('{"max_tokens": null}').sampling.max_tokens == MAX_MODEL_LEN - 3


@pytest.mark.parametrize(
    ("tensors", "param"),
    [
        ({}, "text_input"),
        ({"text_input": "a", "messages": CHAT}, "messages"),
        ({"text_input": "a", "input_ids": [1]}, "input_ids"),
        ({"messages": "[]"}, "messages"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [300]}, "input_ids"),
        ({"input_ids": [1, -1]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": [1.0]}, "input_ids"),
        ({"text_input": b"\xff"}, "text_input"),
        ({"text_input": "\ud800"}, "text_input"),
        ({"messages": '[{"role": "user"}]'}, "messages[0].content"),
    ],
)
def test_bad_prompt_is_named(tensors: dict[str, Any], param: str) -> None:
    assert refused(**tensors).param == param


def test_empty_text_without_bos_is_refused() -> None:
    intake = make_intake(make_tokenizer(add_bos=False))
    with pytest.raises(RequestError, match="text_input is empty"):
        intake.prepare(RawRequest(text_input=""))


def test_empty_text_is_the_bos_alone_where_there_is_one() -> None:
    assert prepare(text_input="").prompt_token_ids == [BOS]


def test_out_of_vocabulary_names_the_range() -> None:
    assert str(refused(input_ids=[5, 300])) == "input_ids[1] must be in [0, 299]."


def test_longest_prompt_leaves_room_for_one_token() -> None:
    assert prepare(input_ids=[1] * (MAX_MODEL_LEN - 1)).sampling.max_tokens == 1


@pytest.mark.parametrize(
    "tensors",
    [
        {"input_ids": [1] * MAX_MODEL_LEN},
        {"text_input": "a" * MAX_MODEL_LEN},
        {"text_input": "a" * (100 * MAX_MODEL_LEN)},
        {"text_input": "a" * (MAX_PROMPT_BYTES + 1)},
        {"messages": json.dumps([{"role": "user", "content": "a" * MAX_MODEL_LEN}])},
        {"messages": json.dumps([{"role": "user", "content": "a" * 10_000}])},
    ],
)
def test_prompt_over_the_context(tensors: dict[str, Any]) -> None:
    error = refused(**tensors)
    assert error.code == "context_length_exceeded"
    # By these words clients such as litellm tell the case, where they do not read the code.
    assert "bytes" in str(error) or str(error).startswith("This model's maximum context length is")
    assert error.param == next(iter(tensors))
    assert len(str(error)) < 200


def test_prompt_over_the_context_is_refused_without_tokenising_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer()
    intake = make_intake(tokenizer)
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **kwargs: pytest.fail("tokenised"))
    with pytest.raises(RequestError, match="400000 characters is longer"):
        intake.prepare(RawRequest(text_input="a b " * 100_000))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
def test_max_tokens_beyond_the_context_names_the_range(name: str) -> None:
    error = refused(input_ids=[1] * 100, sampling_parameters=json.dumps({name: 29}))
    assert error.param == name
    assert "at most 28" in str(error)
    request = prepare(input_ids=[1] * 100, sampling_parameters=json.dumps({name: 28}))
    assert request.sampling.max_tokens == 28


def test_min_tokens_beyond_the_context() -> None:
    assert refused(input_ids=[1] * 100, parameters={"min_tokens": 29}).param == "min_tokens"


def test_model_without_template_takes_no_messages() -> None:
    intake = make_intake(make_tokenizer(chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        intake.prepare(RawRequest(messages=CHAT))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "7",
        "null",
        '{"temperature": NaN}',
        '{"temperature": Infinity}',
        '{"temperature": 1e999}',
        '{"a": ' * 40 + "1" + "}" * 40,
        "[" * 100_000,
        '{"stop": "' + "x" * 270_000 + '"}',
    ],
)
def test_bad_sampling_json(text: str) -> None:
    expected = "temperature" if text.startswith('{"temperature"') else "sampling_parameters"
    assert refused(text_input="hi", sampling_parameters=text).param == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", 2),
        ("typical_p", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-30),  # divides logits: they would overflow
        ("logit_bias", [1]),
        ("logit_bias", {"300": 5}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"7": 1, "07": 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("n", 33),
        ("seed", 2**63),
        ("stop", [1]),
        ("stop", [""]),
        ("stop_token_ids", [300]),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("prompt_logprobs", 21),
        ("ignore_eos", 1),
        ("kv_policy", "fifo"),
        ("kv_budget", 1024),
        ("best_of", 1),
        ("tools", {}),
        ("tool_choice", "required"),
    ],
)
def test_bad_sampling_parameter_is_named(name: str, value: Any) -> None:
    error = refused(text_input="hi", sampling_parameters=json.dumps({name: value}))
    assert error.param == name


@pytest.mark.parametrize("value", [101, -100.5, "1", None, True])
def test_a_bad_logit_bias_is_named_with_its_token(value: Any) -> None:
    error = refused(text_input="hi", sampling_parameters=json.dumps({"logit_bias": {"7": value}}))
    assert error.param == "logit_bias[7]"


def test_logit_bias_comes_from_json_and_from_a_request_parameter() -> None:
    text = '{"logit_bias": {"7": -100, "8": 0.5}}'
    bias = ((7, -100), (8, 0.5))
    assert prepare(text_input="hi", sampling_parameters=text).sampling.logit_bias == bias
    parameters = {"logit_bias": '{"7": -100, "8": 0.5}'}
    assert prepare(text_input="hi", parameters=parameters).sampling.logit_bias == bias


def test_a_kv_policy_comes_from_json_and_from_request_parameters() -> None:
    text = '{"kv_policy": "h2o", "kv_budget": 64}'
    sampling = prepare(text_input="hi", sampling_parameters=text).sampling
    assert (sampling.kv_policy, sampling.kv_budget) == ("h2o", 64)
    parameters = {"kv_policy": "attention_sink", "kv_budget": "128"}
    sampling = prepare(text_input="hi", parameters=parameters).sampling
    assert (sampling.kv_policy, sampling.kv_budget) == ("attention_sink", 128)


def test_asking_for_lru_overrides_a_default_budget() -> None:
    intake = make_intake(defaults={"kv_policy": "h2o", "kv_budget": 64})
    sampling = intake.prepare(RawRequest(text_input="hi")).sampling
    assert (sampling.kv_policy, sampling.kv_budget) == ("h2o", 64)
    sampling = intake.prepare(
        RawRequest(text_input="hi", sampling_parameters='{"kv_policy": "lru"}')
    ).sampling
    assert (sampling.kv_policy, sampling.kv_budget) == ("lru", None)


def test_sampling_json_wins_over_request_parameters() -> None:
    request = prepare(
        text_input="hi",
        parameters={"temperature": "0.5", "top_k": 3, "max_tokens": 7},
        sampling_parameters='{"temperature": 0.25, "max_completion_tokens": 9}',
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.25, 3, 9)


def test_request_parameters_may_be_spelled_as_strings() -> None:
    sampling = prepare(
        text_input="hi",
        parameters={
            "temperature": "0.5",
            "ignore_eos": "true",
            "stop_token_ids": "[1, 2]",
            "stop": "7",
            "seed": "12",
        },
    ).sampling
    assert sampling.temperature == 0.5
    assert sampling.ignore_eos is True
    assert sampling.stop_token_ids == (1, 2)
    assert sampling.stop == ("7",)
    assert sampling.seed == 12


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "hot", "", "[1]", float("nan")])
def test_bad_request_parameter_is_named(value: Any) -> None:
    assert refused(text_input="hi", parameters={"temperature": value}).param == "temperature"


def test_unknown_request_parameter_is_named() -> None:
    error = refused(text_input="hi", parameters={"temprature": 1})
    assert (error.param, error.code) == ("temprature", "unknown_parameter")


def test_transport_parameters_are_kept_apart() -> None:
    parameters = {"tenant": "a", "slo_class": "batch", "timeout": 5, "x-trace": "1"}
    assert prepare(text_input="hi", parameters=parameters).metadata == parameters
    assert refused(text_input="hi", parameters={"tenant": "a" * 300}).param == "tenant"


def test_defaults_give_way_to_the_request() -> None:
    intake = make_intake(defaults={"temperature": 0.6, "top_p": 0.9, "max_tokens": 50})
    raw = RawRequest(text_input="hi", sampling_parameters='{"top_p": 1, "max_new_tokens": 4}')
    sampling = intake.prepare(raw).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 1, 4)


@pytest.mark.parametrize(
    ("tensors", "echo"),
    [
        ({"text_input": "hi"}, True),
        ({"text_input": "hi", "stream": True}, False),
        ({"text_input": "hi", "exclude_input_in_output": True}, False),
        ({"messages": CHAT}, False),
        ({"messages": CHAT, "exclude_input_in_output": False}, True),
        ({"input_ids": [104, 105]}, False),
    ],
)
def test_echo(tensors: dict[str, Any], echo: bool) -> None:
    assert prepare(**tensors).echo_input is echo


def test_echo_of_token_ids_is_their_text() -> None:
    request = prepare(input_ids=[BOS, 104, 105], exclude_input_in_output=False)
    assert request.prompt_text == "<s>hi"


def test_a_stream_echoes_only_when_told_to() -> None:
    assert prepare(text_input="hi", stream=True, exclude_input_in_output=False).echo_input
    assert not prepare(text_input="hi", stream=True).echo_input


# --- whatever comes in, the answer is a request or a RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda item: (
        st.lists(item, max_size=3) | st.dictionaries(st.text(max_size=4), item, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "x"]), JSON)
    | st.fixed_dictionaries({"role": st.just("user"), "content": JSON}),
    max_size=3,
)
NAMES = [item.name for item in fields(SamplingParams)]


def served_or_refused(raw: RawRequest) -> None:
    """Anything but a sound request or a RequestError fails the test."""
    with contextlib.suppress(RequestError):
        request = INTAKE.prepare(raw)
        assert 0 < len(request.prompt_token_ids) < MAX_MODEL_LEN
        assert request.sampling.max_tokens is not None


@given(MESSAGES | JSON, st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3) | JSON)
def test_any_json_is_served_or_refused(messages: Any, sampling: Any) -> None:
    for sampling_parameters in (json.dumps(sampling), None):
        served_or_refused(
            RawRequest(messages=json.dumps(messages), sampling_parameters=sampling_parameters)
        )


@given(st.binary(max_size=64), st.binary(max_size=64) | st.just(b"{}"))
def test_any_bytes_are_served_or_refused(text: bytes, sampling: bytes) -> None:
    served_or_refused(RawRequest(text_input=text, sampling_parameters=sampling))
    served_or_refused(RawRequest(messages=text, sampling_parameters=sampling))


@given(st.dictionaries(st.sampled_from(NAMES), st.text() | st.integers() | st.floats()))
def test_any_request_parameters_are_served_or_refused(parameters: dict[str, Any]) -> None:
    served_or_refused(RawRequest(text_input="hi", parameters=parameters))


def test_no_tokens_are_for_scoring_a_prompt_only() -> None:
    scored = prepare(text_input="hi", sampling_parameters='{"max_tokens": 0, "prompt_logprobs": 0}')
    assert scored.sampling.max_tokens == 0
    text = '{"prompt_logprobs": 1, "n": 2}'
    assert refused(text_input="hi", sampling_parameters=text).param == "n"


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_new_tokens", "max_tokens"])
@pytest.mark.parametrize("fields", [{}, {"min_tokens": 3}])
@pytest.mark.parametrize("value", [0, 1, 10**6, 2**31, 2**70])
def test_what_is_wrong_with_max_tokens_is_said_by_the_name_it_has(
    name: str, fields: dict[str, Any], value: int
) -> None:
    if value == 1 and not fields:
        return
    sampling = json.dumps({name: value, **fields})
    with pytest.raises(RequestError) as caught:
        INTAKE.prepare(RawRequest(text_input="a", sampling_parameters=sampling))
    assert caught.value.param == ("min_tokens" if value == 1 else name)
    assert name in caught.value.message
    assert name == "max_tokens" or "max_tokens" not in caught.value.message


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64, 2**90])
def test_a_number_beyond_its_range_is_told_the_range(seed: int) -> None:
    with pytest.raises(RequestError, match=r"seed must be in \[-"):
        INTAKE.prepare(RawRequest(text_input="a", sampling_parameters=json.dumps({"seed": seed})))


WRONG: list[Any] = [None, True, -1, 1.5, 2**70, "x", [None], [[1]], [{}], {"a": 1}, {"type": []}]
WRONG += [{"type": "json_schema", "json_schema": {"schema": {"type": 5}}}, {"pattern": []}]
WRONG += [[{"type": "function", "function": {"name": "a", "parameters": {"required": [[]]}}}]]
FIELDS = [field.name for field in fields(SamplingParams)]
FIELDS += ["max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "guided_choice"]
FIELDS += ["response_format", "guided_json", "guided_regex", "guided_grammar", "stop"]
FIELDS += ["add_generation_prompt", "continue_final_message", "chat_template_kwargs"]


@pytest.mark.parametrize("source", [{"text_input": "a"}, {"messages": CHAT}])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_any_type_is_taken_or_named(name: str, source: dict[str, str]) -> None:
    intake = Intake(TOKENIZER, ChatTemplate.from_tokenizer(TOKENIZER), 4096, VOCAB_SIZE)
    for value in WRONG:
        request = RawRequest(**source, sampling_parameters=json.dumps({name: value}))
        error = _refusal_of(intake, request)
        assert error is None or (error.param or "").startswith(name), (value, error)
        assert error is None or error.status == 400


def _refusal_of(intake: Intake, request: RawRequest) -> RequestError | None:
    """Anything else that is raised is a fault of ours."""
    try:
        intake.prepare(request)
    except RequestError as error:
        return error
    return None
