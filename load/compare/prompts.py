"""Prompts of an exact number of tokens: random words that share no beginning."""

import random
from pathlib import Path

from tokenizers import Tokenizer

MAX_WORDS = 20_000
TRIES = 50


class RandomWords:
    """Texts of common words that are one token each, drawn anew for every prompt."""

    def __init__(self, checkpoint: Path, seed: int) -> None:
        """``checkpoint``: a folder with ``tokenizer.json``."""
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._random = random.Random(seed)
        self._words = common_words(self._tokenizer.get_vocab())

    def text(self, num_tokens: int) -> str:
        """A text of exactly ``num_tokens`` tokens, special ones not counted."""
        for _ in range(TRIES):
            words = self._random.choices(self._words, k=num_tokens)
            while (excess := self._count(words) - num_tokens) > 0:
                words = words[: len(words) - excess]
            while (count := self._count(words)) < num_tokens:
                words.append(self._random.choice(self._words))
            if count == num_tokens:
                return " ".join(words)
        raise RuntimeError(f"no text of {num_tokens} tokens came of {TRIES} tries")

    def token_ids(self, num_tokens: int) -> list[int]:
        """The tokens of ``text``."""
        return list(self._encode(self.text(num_tokens)))

    def _count(self, words: list[str]) -> int:
        return len(self._encode(" ".join(words)))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def common_words(vocab: dict[str, int]) -> list[str]:
    """Lower-case words of 3 to 8 letters that are one token with the space before them."""
    words = []
    for token in sorted(vocab):
        word = token.lstrip("\u0120\u2581")  # how byte-level BPE and SentencePiece write a space
        if word != token and word.isascii() and word.isalpha() and word.islower():
            words.append(word)
    return [word for word in words if 3 <= len(word) <= 8][:MAX_WORDS]
