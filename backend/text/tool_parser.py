"""Parts a model's text into what it says and what it calls, by the family's own form."""

from dataclasses import dataclass

from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tool_calls import Content, Event, GemmaCalls, JsonCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls: between marks (no end: to the end of the text), or bare."""

    name: str
    begin: str = ""
    end: str = ""
    is_json: bool = True

    def marker_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that belong to calls and must be seen, though others are not."""
        texts = (self.begin, self.end, '<|"|>')
        tokens = tokenizer.special_tokens
        return frozenset(tokens[text] for text in texts if text in tokens)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]")
GEMMA = ToolFormat("gemma4", "<|tool_call>", "<tool_call|>", is_json=False)
LLAMA = ToolFormat("llama3", "<|python_tag|>")
BARE = ToolFormat("json")  # the whole answer is calls


def format_of(template: str | None) -> ToolFormat:
    """The form that a chat template shows; Hermes' where it shows none."""
    source = template or ""
    if GEMMA.begin in source:
        return GEMMA
    if HERMES.begin in source:
        return HERMES
    if MISTRAL.begin in source:
        return MISTRAL
    if LLAMA.begin in source or "Environment: ipython" in source:
        return LLAMA
    return HERMES


class ToolParser:
    """Reads one answer. Text that might become a mark is held back until that is known."""

    def __init__(self, form: ToolFormat, names: frozenset[str], max_calls: int) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._held = ""
        self._calls: JsonCalls | GemmaCalls | None = None
        self._is_between = True  # nothing but space since the start, or the last call
        self.num_calls = 0
        self.is_cut = False  # a call ended before its arguments did
        if form is BARE:
            self._open()

    def marker_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens whose text the parser must see."""
        return self._form.marker_ids(tokenizer)

    def push(self, text: str) -> list[Event]:
        """Take more text; what became certain with it."""
        events: list[Event] = []
        self._held += text
        while self._held:
            before = self._held
            events += self._outside() if self._calls is None else self._inside()
            if self._held == before:
                break
        return events

    def flush(self) -> list[Event]:
        """The text is at its end."""
        held, self._held = self._held, ""
        if self._calls is None:
            is_dropped = not held or (self.num_calls > 0 and not held.strip())
            return [] if is_dropped else [Content(held)]
        return self._calls.push(held) + self._close()

    def _outside(self) -> list[Event]:
        if self._is_between and self._form is LLAMA and self._held.lstrip()[:1] == "{":
            self._open()
            return []
        if self._form.begin in self._held and self._may_call():
            said, self._held = self._held.split(self._form.begin, 1)
            is_dropped = not said or (self._is_between and not said.strip())
            self._open()
            return [] if is_dropped else [Content(said)]
        keep = live_prefix(self._held, self._form.begin) if self._may_call() else 0
        said, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        if self._is_between and not said.strip():
            self._held = said + self._held  # a call may follow, and then the space is nothing
            return []
        self._is_between = False
        return [Content(said)] if said else []

    def _inside(self) -> list[Event]:
        assert self._calls is not None
        if self._form.end and self._form.end in self._held:
            body, self._held = self._held.split(self._form.end, 1)
            return self._calls.push(body) + self._close()
        keep = live_prefix(self._held, self._form.end) if self._form.end else 0
        body, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return self._calls.push(body)

    def _may_call(self) -> bool:
        return self.num_calls < self._max_calls

    def _open(self) -> None:
        self._is_between = False
        self._calls = (JsonCalls if self._form.is_json else GemmaCalls)(self._names)

    def _close(self) -> list[Event]:
        assert self._calls is not None
        calls, self._calls = self._calls, None
        events = calls.flush()
        self.num_calls += calls.num_calls
        self.is_cut |= calls.is_cut
        self._is_between = True
        return events


def live_prefix(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _cut(text: str, keep: int) -> tuple[str, str]:
    """The text without its last ``keep`` characters, and those."""
    cut = len(text) - keep
    return text[:cut], text[cut:]
