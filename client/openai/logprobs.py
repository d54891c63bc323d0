"""Log-probabilities as the backend writes them, in the two forms of OpenAI's endpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that could stand at one position. ``token`` cannot show part of a character."""

    token: str
    logprob: float | None  # None: a prompt's first token
    token_bytes: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the text, where its text begins there (characters), and the likeliest ones."""

    chosen: Candidate
    text_offset: int
    top: tuple[Candidate, ...]


class LogprobReader:
    """Reads one choice's entries, in order: it counts the characters before each."""

    def __init__(self) -> None:
        self._offset = 0

    def read(self, entries: str | None) -> list[TokenLogprob]:
        """Decode the entries of one delta: JSON, or None for none."""
        return [self._read_token(entry) for entry in orjson.loads(entries)] if entries else []

    def _read_token(self, entry: dict[str, Any]) -> TokenLogprob:
        candidates = [_candidate(item) for item in entry.values()]
        ranked = [item for item in entry.values() if item["rank"] is not None]
        top = tuple(_candidate(item) for item in sorted(ranked, key=lambda item: item["rank"]))
        offset = self._offset
        self._offset += len(candidates[0].token)
        return TokenLogprob(candidates[0], offset, top)


def _candidate(item: dict[str, Any]) -> Candidate:
    return Candidate(item["decoded_token"], item["logprob"], item["bytes"])


def chat_logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion or a chunk of it."""
    content = [
        {
            **_chat_candidate(entry.chosen),
            "top_logprobs": [_chat_candidate(item) for item in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_candidate(item: Candidate) -> dict[str, Any]:
    return {"token": item.token, "logprob": item.logprob, "bytes": list(item.token_bytes)}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion; the top ones hold the chosen token too."""
    return {
        "tokens": [entry.chosen.token for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": [_likeliest(entry) for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _likeliest(entry: TokenLogprob) -> dict[str, float | None] | None:
    if entry.chosen.logprob is None:
        return None
    return {item.token: item.logprob for item in (*entry.top, entry.chosen)}
