"""Log-probabilities that stay beside the text they belong to."""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.backend.chunk import Alternative, TokenLogprobs
from shoal.backend.text.tokenizer import Tokenizer
from shoal.scheduler.outputs import SampledToken


@dataclass(slots=True)
class _Held:
    token: SampledToken
    start: int  # characters of the output before the token's text
    text: str
    is_open: bool  # ends inside a character: if nothing follows, the end adds to its text


class LogprobAligner:
    """Gives each token's log-probabilities when its text goes out, and none for text that never
    does: so the entries' texts, joined, are the emitted text.

    A token that ends inside a character has no text; the character belongs to the token that
    completes it. A token that a stop string cuts keeps the text before the cut.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: deque[_Held] = deque()
        self._num_chars = 0  # of all tokens so far
        self._num_emitted = 0

    def push(self, token: SampledToken, text: str, in_character: bool) -> None:
        """Take a token, what the detokeniser gave for it, and whether it ends in a character."""
        self._held.append(_Held(token, self._num_chars, text, in_character))
        self._num_chars += len(text)

    def append(self, text: str) -> None:
        """Take text that only the end made certain: it is the last token's."""
        if self._held:
            self._held[-1].text += text
        self._num_chars += len(text)

    def release(self, num_chars: int, ended: bool, stop_hit: bool) -> tuple[TokenLogprobs, ...]:
        """The entries that ``num_chars`` more emitted characters let go; at the end all that have
        a part in the text."""
        self._num_emitted += num_chars
        released = []
        while self._held and self._may_go(self._held[0], ended, stop_hit):
            held = self._held.popleft()
            text = held.text[: self._num_emitted - held.start]
            released.append(self._describe(held.token, text, len(text) < len(held.text)))
        return tuple(released)

    def _may_go(self, held: _Held, ended: bool, stop_hit: bool) -> bool:
        if ended and not stop_hit:
            return True
        if not stop_hit and held.is_open and held is self._held[-1]:
            return False
        if stop_hit or not held.text:
            return held.start < self._num_emitted
        return held.start + len(held.text) <= self._num_emitted

    def _describe(self, token: SampledToken, text: str, is_cut: bool) -> TokenLogprobs:
        assert token.logprob is not None
        top = _alternatives(self._tokenizer, token)
        rank = _rank(top, token.token_id)
        token_bytes = text.encode() if is_cut else self._tokenizer.token_bytes(token.token_id)
        sampled = Alternative(token.token_id, text, token.logprob, rank, token_bytes)
        return TokenLogprobs(sampled, top)


def describe_prompt(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    scores: Sequence[SampledToken],
    prompt_text: str,
) -> tuple[TokenLogprobs, ...]:
    """An entry for each token of a prompt; the first has no log-probability, as nothing is before
    it. Their texts, joined, are ``prompt_text``, so a BOS that was put before it has none."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    entries = []
    tokens = [SampledToken(token_ids[0]), *scores]
    for index, token in enumerate(tokens):
        token_bytes = tokenizer.token_bytes(token.token_id)
        is_put_before = index == 0 and token.token_id == tokenizer.bos_token_id
        is_put_before &= not prompt_text.encode().startswith(token_bytes)
        is_last = index == len(tokens) - 1
        text = "" if is_put_before else decoder.decode(token_bytes, final=is_last)
        top = _alternatives(tokenizer, token)
        rank = _rank(top, token.token_id)
        chosen = Alternative(token.token_id, text, token.logprob, rank, token_bytes)
        entries.append(TokenLogprobs(chosen, top))
    return tuple(entries)


def _alternatives(tokenizer: Tokenizer, token: SampledToken) -> tuple[Alternative, ...]:
    pieces = [(tokenizer.token_bytes(token_id), token_id, p) for token_id, p in token.top_logprobs]
    return tuple(
        Alternative(token_id, piece.decode("utf-8", "replace"), logprob, rank, piece)
        for rank, (piece, token_id, logprob) in enumerate(pieces, start=1)
    )


def _rank(top: Sequence[Alternative], token_id: int) -> int | None:
    return next((item.rank for item in top if item.token_id == token_id), None)
