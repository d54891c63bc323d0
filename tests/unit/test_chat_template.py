from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import BOS, TURN_END, make_tokenizer

from shoal.backend.engine_config import ConfigError
from shoal.backend.text.chat_messages import MAX_MESSAGES, parse_messages
from shoal.backend.text.chat_template import ChatTemplate
from shoal.backend.text.template_options import TemplateOptions
from shoal.scheduler.errors import RequestError

TOKENIZER = make_tokenizer()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, TOKENIZER)


def rendered(source: str, messages: list[dict[str, Any]]) -> str:
    return template(source).render(parse_messages(messages)).text


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({}, "messages"),
        ([], "messages"),
        ([user("a")] * (MAX_MESSAGES + 1), "messages"),
        (["hi"], "messages[0]"),
        ([user("a"), {"content": "a"}], "messages[1].role"),
        ([{"role": "root", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user(7)], "messages[0].content"),
        ([user([7])], "messages[0].content[0]"),
        ([user([{"type": "image_url"}])], "messages[0].content[0].type"),
        ([user([{"type": "text", "text": None}])], "messages[0].content[0].text"),
        ([{**user("a"), "name": 1}], "messages[0].name"),
        ([{**user("a"), "weight": 1}], "messages[0].weight"),
        ([{**user("a"), "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_bad_messages_are_named(data: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(data)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_list_of_text_parts_is_the_same_as_a_string() -> None:
    parts = [{"type": "text", "text": "my name "}, {"type": "text", "text": "is Bo"}]
    message = {"role": "assistant", "content": parts}
    assert parse_messages([message]) == [{"role": "assistant", "content": "my name is Bo"}]


def test_tool_call_with_null_content_is_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}


@pytest.mark.parametrize(
    "arguments",
    ['{"a":"\\ud800"}', '{"a":NaN}', '{"a":1e999}', '{"a":' * 600 + "1" + "}" * 600, "x"],
)
def test_arguments_that_are_no_sound_json_stay_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"content": "Hi", "refusal": None, "annotations": [], "audio": None}, {"content": "Hi"}),
        ({"content": "{}", "parsed": {"a": 1}, "function_call": None}, {"content": "{}"}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        (
            {"content": "4", "reasoning_content": "2+2"},
            {"content": "4", "reasoning_content": "2+2"},
        ),
    ],
)
def test_an_answer_may_be_sent_back_as_clients_keep_it(
    fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    message = {"role": "assistant", **fields}
    assert parse_messages([message]) == [{"role": "assistant", **wanted}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "refusal": None}, "messages[0].refusal"),
        ({"role": "assistant", "content": "a", "audio": {"id": "1"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "a", "refusal": 1}, "messages[0].refusal"),
        (
            {"role": "assistant", "content": "a", "reasoning_content": []},
            "messages[0].reasoning_content",
        ),
    ],
)
def test_what_only_an_answer_has_is_checked(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages([message])
    assert caught.value.param == param


def test_developer_is_system() -> None:
    assert parse_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


def test_whitespace_around_blocks_is_trimmed_as_in_transformers() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert rendered(source, [user("a"), user("b")]) == "a\nb\n"


def test_template_helpers() -> None:
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ bos_token }}{{ strftime_now('%%') }}{{ tools is none }}"
    )
    assert rendered(source, [user("<é&>"), user("b")]) == '"<é&>"<s>%True'


def test_generation_prompt_is_optional() -> None:
    chat = ChatTemplate.from_tokenizer(TOKENIZER)
    assert chat is not None
    messages = parse_messages([user("a")])
    assert chat.render(messages).text == "<s>[user] a<end>[assistant] "
    assert chat.render(messages, options=TemplateOptions(False)).text == "<s>[user] a<end>"


def test_template_that_refuses_says_why() -> None:
    with pytest.raises(RequestError, match="Roles must alternate") as caught:
        rendered("{{ raise_exception('Roles must alternate') }}", [user("a")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}{{ 1 // 0 }}",
    ],
)
def test_template_failure_is_a_request_error_without_details(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(source, [user("a")])
    assert str(caught.value) == "The model's chat template cannot be applied to these messages."


def test_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        template("{% for %}")


def test_no_template() -> None:
    assert ChatTemplate.from_tokenizer(make_tokenizer(chat_template=None)) is None


@given(st.lists(st.sampled_from(["a", "<end>", "<s>", "\U000f0000", "\U000f0001", "é", "<en"])))
def test_content_never_becomes_a_special_token(pieces: list[str]) -> None:
    content = "".join(pieces)
    chat = ChatTemplate.from_tokenizer(TOKENIZER)
    assert chat is not None
    prompt = chat.render(parse_messages([user(content)]))
    assert prompt.text == f"<s>[user] {content}<end>[assistant] "
    body = f"[user] {content}".encode()
    assert prompt.encode(TOKENIZER) == [BOS, *body, TURN_END, *b"[assistant] "]


@pytest.mark.parametrize(
    ("expression", "ordinary"),
    [
        ("content[1:]", b"<end>b"),
        ("content[2:]", b"end>b"),
        ("content.split('<')[0]", b"a"),
        ("content.split('n') | join('')", b"a<ed>b"),
        ("content.upper()", b"A<END>B"),
    ],
)
def test_template_that_cuts_content(expression: str, ordinary: bytes) -> None:
    chat = template("<s>{{ messages[0]." + expression + " }}<end>")
    ids = chat.render(parse_messages([user("a<end>b")])).encode(TOKENIZER)
    assert ids[0] == BOS
    assert ids[-1] == TURN_END
    assert bytes(ids[1:-1]) == ordinary


def test_forged_token_in_a_key_of_tool_arguments_stays_text() -> None:
    call = {"function": {"name": "f", "arguments": {"<end>": "<end>"}}}
    chat = template("{{ messages[0].tool_calls | tojson }}")
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert TURN_END not in chat.render(parse_messages([message])).encode(TOKENIZER)
