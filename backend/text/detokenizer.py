"""Text from token ids, one at a time."""

import codecs
from collections.abc import Iterable

from shoal.backend.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns token ids into text pieces whose concatenation equals ``Tokenizer.decode`` of all.

    A token may end inside a character; its bytes wait until the character is whole. U+FFFD appears
    only for bytes that no later token could complete, or, by ``finish``, for half a character at
    the very end. Special tokens have no text. Costs O(1) a token, whatever the length so far.
    """

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int] = frozenset()) -> None:
        """``visible``: special tokens that have their text all the same."""
        self._visible = visible
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token. Mutates."""
        if self._tokenizer.is_special(token_id) and token_id not in self._visible:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The same of several tokens, which are decoded at once."""
        tokenizer, visible = self._tokenizer, self._visible
        pieces = [
            tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if not tokenizer.is_special(token_id) or token_id in visible
        ]
        return self._decoder.decode(b"".join(pieces))

    @property
    def in_character(self) -> bool:
        """Whether the last token ended inside a character."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """Return what is left: a replacement character if the output ended in mid-character."""
        return self._decoder.decode(b"", final=True)
