"""Chats of every family, from messages to token ids, against transformers' apply_chat_template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from shoal.backend.text.chat_messages import parse_messages
from shoal.backend.text.chat_template import ChatTemplate
from shoal.backend.text.template_options import TemplateOptions
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tools import take_tools
from shoal.scheduler.errors import RequestError

TEMPLATES = Path(__file__).parent.parent / "data" / "chat_templates"


@dataclass(frozen=True)
class Family:
    """A family's special tokens. ``adds_bos``: its tokenizer puts BOS before any text."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    adds_bos: bool = False


LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
GEMMA4 = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>")
GEMMA4 += ("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>')
GEMMA4 += ("<|tool_response>", "<tool_response|>", "<|image|>", "<|audio|>", "<|video|>")
FAMILIES = {
    "llama-2": Family("llama2", ("<s>", "</s>"), "</s>", "<s>", True),
    "llama-3": Family("llama3", LLAMA3, "<|eot_id|>", "<|begin_of_text|>", True),
    "llama-3.1": Family("llama3_1", LLAMA3, "<|eot_id|>", "<|begin_of_text|>", True),
    "llama-3.2": Family("llama3_2", LLAMA3, "<|eot_id|>", "<|begin_of_text|>", True),
    "mistral, mixtral": Family("mistral", ("<s>", "</s>"), "</s>", "<s>", True),
    "smollm-3": Family("smollm3", (*QWEN, "<think>", "</think>"), "<|im_end|>"),
    "qwen-2": Family("qwen2", QWEN, "<|im_end|>"),
    "qwen-2.5": Family("qwen2_5", QWEN, "<|im_end|>"),
    "qwen-3": Family("qwen3", QWEN, "<|im_end|>"),
    "qwen-3 2507, qwen-3-moe": Family("qwen3_instruct_2507", QWEN, "<|im_end|>"),
    "gemma-3": Family(
        "gemma3",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        "<end_of_turn>",
        "<bos>",
        True,
    ),
    "gemma-4": Family("gemma4", GEMMA4, "<turn|>", "<bos>", True),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather, in a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "call_1", "type": "function", "function": function}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SYSTEM = said("system", " Be brief.\n")
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [said("user", "What's 1 < 2 & 3?")],
    "space": [said("user", "  hi 🤗\n\n")],
    "empty": [said("user", "")],
    "system": [SYSTEM, said("user", "hi")],
    "turns": [SYSTEM, said("user", "I am Bo"), said("assistant", " Hello! "), said("user", "Who?")],
    "parts": [said("user", parts("one ", " two"))],
    "all parts": [
        said("system", parts("Be ", "brief. ")),
        said("user", parts(" a")),
        said("assistant", parts("b ", " c")),
        said("user", parts("d", "")),
    ],
    "thinks": [said("system", "Be brief. /think"), said("user", "hi"), said("assistant", "\n\nHo")],
    "thinks not": [said("system", "/no_think"), said("user", "hi"), said("assistant", "\nHo")],
    "answered": [said("user", "hi"), said("assistant", "Hello, ")],
    "call": [
        said("user", "Weather in Rome?"),
        said("assistant", None, tool_calls=[call("weather", city="Rome", days=2)]),
    ],
    "result": [
        SYSTEM,
        said("user", "Weather in Zürich?"),
        said("assistant", "", tool_calls=[call("weather", city="Zürich")]),
        said("tool", "rain", tool_call_id="call_1"),
    ],
    "after a result": [
        said("user", "Weather in Rome?"),
        said("assistant", "Let me see.", tool_calls=[call("weather", city='"Rome"')]),
        said("tool", '{"sky": "blue"}', tool_call_id="call_1"),
        said("assistant", "Blue."),
        said("user", "And now?"),
    ],
    "two calls": [
        said("user", "Rome and Bern?"),
        said("assistant", "", tool_calls=[call("weather", city="Rome"), call("weather", city="B")]),
        said("tool", "sun", tool_call_id="call_1"),
        said("tool", "snow", tool_call_id="call_2"),
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [TOOL]},
    "no start of an answer": {"add_generation_prompt": False},
    "no thoughts": {"chat_template_kwargs": {"enable_thinking": False}},
    "thoughts": {"chat_template_kwargs": {"enable_thinking": True}},
}


def fast_tokenizer(family: Family) -> FastTokenizer:
    """A token a byte, and the family's special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(text, special=True) for text in family.special])
    if family.adds_bos:
        assert family.bos is not None
        bos = (family.bos, fast.token_to_id(family.bos))
        fast.post_processor = processors.TemplateProcessing(f"{family.bos} $A", None, [bos])
    return fast


@dataclass(frozen=True)
class Pair:
    """The same checkpoint, read by transformers and by us."""

    theirs: PreTrainedTokenizerFast
    ours: Tokenizer
    template: ChatTemplate


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family = FAMILIES[request.param]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=fast_tokenizer(family),
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=(TEMPLATES / f"{family.template}.jinja").read_text(),
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    ours = Tokenizer.from_checkpoint(folder)
    template = ChatTemplate.from_tokenizer(ours)
    assert template is not None
    return Pair(theirs, ours, template)


def with_objects(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As transformers wants calls: their arguments decoded."""
    return [
        {
            **message,
            "content": message["content"] or "",
            **(
                {
                    "tool_calls": [
                        {
                            **item,
                            "function": {
                                **item["function"],
                                "arguments": json.loads(item["function"]["arguments"]),
                            },
                        }
                        for item in message["tool_calls"]
                    ]
                }
                if "tool_calls" in message
                else {}
            ),
        }
        for message in chat
    ]


def joined(chat: list[dict[str, Any]], part_roles: frozenset[str]) -> list[dict[str, Any]]:
    """For templates that know no parts of some messages, or lose one."""
    return [
        {**m, "content": "".join(part["text"] for part in m["content"])}
        if isinstance(m["content"], list) and m["role"] not in part_roles
        else m
        for m in chat
    ]


def their_ids(pair: Pair, chat: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | None:
    """None: the template refuses."""
    options = {"add_generation_prompt": True, **options}
    variables = options.pop("chat_template_kwargs", {})
    messages = with_objects(chat)
    messages = joined(messages, pair.template.part_roles)
    try:
        return pair.theirs.apply_chat_template(messages, return_dict=False, **options, **variables)
    except Exception:  # whatever a template may raise
        return None


def our_ids(pair: Pair, chat: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | None:
    use = take_tools({"tools": options.get("tools")})
    chosen = TemplateOptions(
        add_generation_prompt=options.get("add_generation_prompt", True),
        variables=options.get("chat_template_kwargs", {}),
    )
    try:
        rendered = pair.template.render(
            parse_messages(chat, part_roles=pair.template.part_roles),
            use.tools if use else (),
            chosen,
        )
    except RequestError:
        return None
    return rendered.encode(pair.ours)


def needs_words(pair: Pair, chat: list[dict[str, Any]], options: dict[str, Any]) -> bool:
    """Whether the chat has what the template knows nothing of: there ours is told in words."""
    source = pair.ours.settings.chat_template or ""
    has_calls = any(m["role"] == "tool" or "tool_calls" in m for m in chat)
    return ("tools" in options and "tools" not in source) or (
        has_calls and "tool_calls" not in source
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chat", CHATS)
def test_ids_are_those_of_transformers(pair: Pair, chat: str, options: str) -> None:
    messages, chosen = CHATS[chat], OPTIONS[options]
    ours = our_ids(pair, messages, chosen)
    if needs_words(pair, messages, chosen):
        return
    assert ours == their_ids(pair, messages, chosen)
    if ours is not None:
        bos = pair.ours.bos_token_id
        assert bos is None or (ours[0] == bos and ours.count(bos) == _num_bos(pair, messages))


def _num_bos(pair: Pair, chat: list[dict[str, Any]]) -> int:
    """One; Llama 2's template writes one before each of the user's turns."""
    source = pair.ours.settings.chat_template or ""
    if "bos_token + '[INST] '" in source:
        return sum(message["role"] == "user" for message in chat)
    return 1


def test_most_chats_are_taken(pair: Pair) -> None:
    taken = [chat for chat in CHATS.values() if our_ids(pair, chat, {}) is not None]
    assert len(taken) >= 0.6 * len(CHATS)


def test_an_answer_goes_on_where_it_stopped(pair: Pair) -> None:
    chat = CHATS["answered"]
    options = TemplateOptions(add_generation_prompt=False, continues=True)
    rendered = pair.template.render(parse_messages(chat), (), options)
    theirs = pair.theirs.apply_chat_template(chat, return_dict=False, continue_final_message=True)
    assert rendered.encode(pair.ours) == theirs


# What SmolLM3's own template is made of, in few words.
MARKED = """{%- set mode = "/think" if enable_thinking | default(true) else "/no_think" -%}
{{- strftime_now("%d %B %Y") ~ mode ~ (python_tools is defined) -}}
{%- for tool in (xml_tools or [])[:] -%}{{- (tool | string) ~ "\n" -}}{%- endfor -%}
{%- for message in messages -%}
  {%- generation -%}{%- set mode = "inside" -%}
  {{ message.role ~ message.content.lstrip("\n") ~ mode }}
  {%- endgeneration -%}
{%- endfor -%}{{- mode -}}"""


@pytest.mark.parametrize("enable_thinking", [True, False])
@pytest.mark.parametrize("description", ["plain", "l'été <|im_end|> 🤗", None])
def test_tools_of_a_second_name_and_words_marked_for_training(
    description: str | None, enable_thinking: bool, tmp_path: Path
) -> None:
    family = FAMILIES["smollm-3"]
    theirs = PreTrainedTokenizerFast(tokenizer_object=fast_tokenizer(family), chat_template=MARKED)
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.from_checkpoint(tmp_path)
    template = ChatTemplate.from_tokenizer(ours)
    assert template is not None
    function = TOOL["function"] | ({"description": description} if description else {})
    use = take_tools({"tools": [TOOL | {"function": function}]})
    assert use is not None
    chat = [said("user", "\nhi"), said("assistant", "Ho")]
    options = TemplateOptions(variables={"enable_thinking": enable_thinking})
    rendered = template.render(parse_messages(chat), use.tools, options)
    expected = theirs.apply_chat_template(
        chat, tokenize=False, xml_tools=list(use.tools), enable_thinking=enable_thinking
    )
    assert rendered.text == expected
    ids = rendered.encode(ours)
    assert ours.decode(ids) == expected
    assert not {ours.special_tokens[text] for text in family.special} & set(ids)
