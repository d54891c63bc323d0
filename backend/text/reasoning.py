"""Parts what a model thinks, between <think> marks, from what it answers."""

from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tool_parser import live_prefix

BEGIN, END = "<think>", "</think>"


def has_marks(template: str) -> bool:
    """Whether a chat template is of a model that thinks between marks."""
    return END in template


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the opening mark, so that the answer begins with thoughts."""
    return prompt.rstrip().endswith(BEGIN)


class ReasoningParser:
    """Reads one answer. White space around the marks is of neither part.

    Text that might become a mark is held back until that is known; only thoughts at the very start
    count.
    """

    def __init__(self, is_inside: bool) -> None:
        self._is_before, self._is_inside = not is_inside, is_inside
        self._held = ""
        self._strips = True  # space at the start of a part

    @staticmethod
    def marker_ids(tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens whose text the parser must see."""
        tokens = tokenizer.special_tokens
        return frozenset(tokens[text] for text in (BEGIN, END) if text in tokens)

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; thoughts and answer that became certain with it."""
        if not self._is_before and not self._is_inside and not self._strips:
            return "", text
        self._held += text
        if self._is_before:
            self._find_begin()
        thoughts = self._thoughts() if self._is_inside else ""
        return thoughts, self._answer()

    def flush(self) -> tuple[str, str]:
        """The text is at its end."""
        held, self._held = self._held, ""
        if self._is_inside:
            return held.rstrip(), ""
        return "", "" if self._strips and not self._is_before else held

    def _find_begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(BEGIN):
            self._held = start[len(BEGIN) :]
            self._is_before, self._is_inside = False, True
        elif not BEGIN.startswith(start):
            self._is_before = self._strips = False

    def _thoughts(self) -> str:
        if self._strips:
            self._held = self._held.lstrip()
            self._strips = not self._held
        if END in self._held:
            thoughts, self._held = self._held.split(END, 1)
            self._is_inside, self._strips = False, True
            return thoughts.rstrip()
        # Space before a mark is dropped with it, so it waits too.
        cut = len(self._held) - live_prefix(self._held, END)
        cut = len(self._held[:cut].rstrip())
        thoughts, self._held = self._held[:cut], self._held[cut:]
        return thoughts

    def _answer(self) -> str:
        if self._is_before or self._is_inside:
            return ""
        if self._strips:
            self._held = self._held.lstrip()
            self._strips = not self._held
        answer, self._held = self._held, ""
        return answer
