"""Chat messages to a prompt, by the template that the model's own checkpoint carries."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.backend.engine_config import ConfigError
from shoal.backend.text.chat_messages import joined_text
from shoal.backend.text.reasoning import has_marks
from shoal.backend.text.template_options import TemplateOptions
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tool_parser import ToolFormat, format_of
from shoal.backend.text.tools import calls_as_text, describe_tools
from shoal.scheduler.errors import RequestError

MAX_TEMPLATE_REASON = 200  # characters of a template's own complaint that a client sees
_DEFAULT_OPTIONS = TemplateOptions()
# Rare ideographs: templates may write what Python shows of a value, which escapes private-use ones.
_FIRST_RARE, _LAST_RARE = 0x20000, 0x2A6DF


_ASKED = {"role": "user", "content": "a"}
_CALL = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
# Chats with a message of each role, whose content is replaced by parts.
_PROBES: dict[str, list[dict[str, Any]]] = {
    "user": [_ASKED],
    "system": [{"role": "system", "content": ""}, _ASKED],
    "assistant": [_ASKED, {"role": "assistant", "content": ""}],
    "tool": [_ASKED, _CALLED, {"role": "tool", "content": "", "tool_call_id": "0"}],
}


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt. If a client's own words spell a special token, ``mark`` is between their letters.

    The mark is a character that no message uses; None: nothing had to be marked.
    """

    marked: str
    mark: str | None

    @property
    def text(self) -> str:
        """The prompt as the template wrote it."""
        return self.marked if self.mark is None else self.marked.replace(self.mark, "")

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids; special tokens come from the template only, never from a message."""
        if self.mark is None:
            return tokenizer.encode(self.marked)
        return tokenizer.encode_marked(self.marked, self.mark)


class ChatTemplate:
    """A compiled template in a sandbox. Stateless after construction, thread-safe."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when the template does not compile."""
        self._special_pattern = tokenizer.special_pattern
        self._special_texts = dict(tokenizer.settings.special_texts)
        self._tool_format = format_of(source)
        self.has_reasoning = has_marks(source)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"The model's chat template does not compile: {error}.") from error
        # SmolLM3's has two lists of tools: called by JSON, and by Python code.
        self._tools_name = next((name for name in ("tools", "xml_tools") if name in names), None)
        self._knows_calls = "tool_calls" in source
        self.part_roles = frozenset(role for role in _PROBES if self._takes_parts(role))

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The checkpoint's template; None when it has none."""
        source = tokenizer.settings.chat_template
        return None if source is None else cls(source, tokenizer)

    def _takes_parts(self, role: str) -> bool:
        """Whether the template shows every part of such a message, and shows it as text."""
        words = ("first part", "second part")
        parts = [{"type": "text", "text": text} for text in words]
        messages = [
            {**message, "content": parts} if message["role"] == role else message
            for message in _PROBES[role]
        ]
        try:
            text = self._render(messages, [], _DEFAULT_OPTIONS)
        except Exception:  # as in render
            return False
        return all(word in text for word in words) and "type" not in text

    @property
    def tool_format(self) -> ToolFormat:
        """How this model writes calls."""
        return self._tool_format

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: tuple[dict[str, Any], ...] = (),
        options: TemplateOptions = _DEFAULT_OPTIONS,
    ) -> RenderedChat:
        """Apply the template to parsed messages and tools. Raises RequestError when it refuses."""
        end_mark = None
        if options.continues:
            end_mark = _free_character([messages, list(tools)])
            messages = _with_end_marked(messages, end_mark)
        if not self._knows_calls:
            messages = [_calls_as_text(message) for message in messages]
        if tools and self._tools_name is None:
            messages = [_as_text(message) for message in messages]
            messages, tools = describe_tools(messages, tools), ()
        words: list[Any] = [messages, list(tools)]
        mark = _free_character(words) if self._spells_special(words) else None
        if mark is not None:
            words = _map_strings(words, self._breaker(mark))
        try:
            text = self._render(words[0], words[1], options)
        except Exception as error:  # a template runs arbitrary expressions on client data
            raise RequestError(_refusal(error), param="messages") from error
        if end_mark is not None:
            text = _cut_at(text, end_mark)
        return RenderedChat(text, mark)

    def _render(self, messages: list[Any], tools: list[Any], options: TemplateOptions) -> str:
        return self._template.render(
            messages=messages,
            add_generation_prompt=options.add_generation_prompt,
            documents=None,
            **{"tools": None, self._tools_name or "tools": tools or None},
            **options.variables,
            **self._special_texts,
        )

    def _spells_special(self, words: list[Any]) -> bool:
        return any(self._special_pattern.search(text) for text in _strings(words))

    def _breaker(self, mark: str) -> Callable[[str], str]:
        """Puts the mark behind each letter of a special token, so that no cut of it is one."""

        def break_up(match: re.Match[str]) -> str:
            return "".join(char + mark for char in match.group())

        return lambda text: self._special_pattern.sub(break_up, text)


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    has_calls = message["role"] == "tool" or "tool_calls" in message
    return calls_as_text(_as_text(message)) if has_calls else message


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": joined_text(message["content"])}


def _with_end_marked(messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """The mark, and a space that shows whether the template trims, at the end of the last one."""
    last = _as_text(messages[-1])
    if last["role"] != "assistant" or not last["content"]:
        raise RequestError(
            "continue_final_message needs a last message of the assistant, with content.",
            param="continue_final_message",
        )
    return [*messages[:-1], {**last, "content": f"{last['content']}{mark} "}]


def _cut_at(text: str, mark: str) -> str:
    """The prompt up to the mark; without trailing space where the template trims it, as
    transformers' ``continue_final_message``."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise RequestError(
            "The model's chat template does not show the last message as it is, so "
            "continue_final_message cannot be used.",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _strings(value: Any) -> list[str]:
    """All strings in it, keys included: a template may print those too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


def _free_character(messages: list[Any]) -> str:
    """A character that no message holds."""
    used = set().union(*map(set, _strings(messages)))
    for code in range(_FIRST_RARE, _LAST_RARE):
        if chr(code) not in used:
            return chr(code)
    raise RequestError("messages hold every ideograph that there is.", param="messages")


def _refusal(error: Exception) -> str:
    if isinstance(error, _TemplateRefusal):
        return f"The model's chat template says: {str(error)[:MAX_TEMPLATE_REASON]}"
    return "The model's chat template cannot be applied to these messages."


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by a template's own ``raise_exception``."""


def _environment() -> ImmutableSandboxedEnvironment:
    """Set up as transformers does it, so that the same template gives the same text."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is only a scope of
    its own, as with transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters; a prompt must not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
