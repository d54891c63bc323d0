"""Stop strings that may span tokens."""

from collections.abc import Sequence


class StopChecker:
    """Passes text on up to the first stop string, which is never emitted, not even in part.

    Text is held back only while it is the beginning of a stop string. Each stop string has its own
    Knuth-Morris-Pratt automaton, fed one character at a time, so the cost does not grow with the
    text, and the result does not depend on how the text was cut into pushes: the stop string that
    is complete first wins; of two complete at the same character, the longer.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._matchers = [_Matcher(text) for text in stop_strings]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be emitted and whether a stop ended it. Mutates."""
        if not self._matchers:
            return text, False
        num_held = len(self._held)
        buffer = self._held + text
        for idx, char in enumerate(text, start=num_held):
            complete = [matcher.length for matcher in self._matchers if matcher.step(char)]
            if complete:
                self._held = ""
                return buffer[: idx + 1 - max(complete)], True
        num_live = max(matcher.num_matched for matcher in self._matchers)
        cut = len(buffer) - num_live
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """Return the held text: the output ended and it was no stop string after all. Mutates."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt for one pattern; ``num_matched`` is the live prefix's length."""

    def __init__(self, pattern: str) -> None:
        assert pattern
        self._pattern = pattern
        self._fallback = _fallback_table(pattern)
        self.length = len(pattern)
        self.num_matched = 0

    def step(self, char: str) -> bool:
        """Take one character; return whether the pattern is complete with it. Mutates."""
        matched = self.num_matched
        while matched and self._pattern[matched] != char:
            matched = self._fallback[matched]
        if self._pattern[matched] == char:
            matched += 1
        complete = matched == self.length
        self.num_matched = self._fallback[matched] if complete else matched
        return complete


def _fallback_table(pattern: str) -> list[int]:
    """``table[n]``: length of the longest proper prefix of pattern[:n] that is also its suffix."""
    table = [0] * (len(pattern) + 1)
    length = 0
    for idx in range(1, len(pattern)):
        while length and pattern[idx] != pattern[length]:
            length = table[length]
        if pattern[idx] == pattern[length]:
            length += 1
        table[idx + 1] = length
    return table
