"""What the fake tritonserver answers, in pieces, and the scripts that say so."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """One response of the fake backend; ``output`` holds extra tensors by name."""

    text: str = ""
    num_tokens: int = 1
    finish_reason: str | None = None
    delay_s: float = 0.0
    error: dict[str, Any] | None = None  # as the `error` tensor
    triton_error: str | None = None  # as tritonserver's own error message
    logprobs: tuple[dict[str, Any], ...] = ()  # one entry a token, as the backend writes them
    prompt_logprobs: tuple[dict[str, Any], ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()  # deltas
    reasoning: str = ""
    embedding: tuple[float, ...] = ()
    index: int | None = None  # of a request for several choices
    beside: tuple["Piece", ...] = ()  # of further choices, in the same response
    is_last: bool = True  # with a finish reason: the request ends


@dataclass
class Request:
    """One decoded inference request, as the fake backend saw it."""

    inputs: dict[str, Any]
    id: str
    parameters: dict[str, Any]
    version: str = ""  # empty: the server's choice
    cancelled: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def sampling(self) -> dict[str, Any]:
        return json.loads(self.inputs.get("sampling_parameters", "{}"))


Script = Callable[[Request], Iterator[Piece]]


def endless(request: Request) -> Iterator[Piece]:
    """Until it is cancelled."""
    while True:
        yield Piece("x", delay_s=0.01)


def echo_script(request: Request) -> Iterator[Piece]:
    """As many numbered words as max_tokens says (4 unless given)."""
    sampling = request.sampling
    count = sampling.get("max_completion_tokens", sampling.get("max_tokens", 4))
    num_choices = sampling.get("n", 1)
    if num_choices > 1:
        yield from _echo_choices(count, num_choices)
        return
    for index in range(count):
        yield Piece(f"w{index} ", finish_reason="length" if index == count - 1 else None)


def _echo_choices(count: int, num_choices: int) -> Iterator[Piece]:
    """Choice i says i words more than the first; what is said at once comes in one response."""
    for step in range(count + num_choices - 1):
        pieces = [
            Piece(
                f"c{index}w{step} ",
                finish_reason="length" if step == count + index - 1 else None,
                index=index,
                is_last=index == num_choices - 1,
            )
            for index in range(num_choices)
            if step < count + index
        ]
        yield replace(pieces[0], beside=tuple(pieces[1:]))


def join_choices(pieces: list[Piece]) -> Piece:
    parts = [part for piece in pieces for part in (piece, *piece.beside)]
    indices = sorted({part.index for part in parts if part.index is not None})
    if not indices:
        return _join(pieces)
    joined = [
        replace(_join([part for part in parts if part.index == index]), index=index)
        for index in indices
    ]
    return replace(joined[0], beside=tuple(joined[1:]))


def _join(pieces: list[Piece]) -> Piece:
    """What a backend sends to a client that does not stream."""
    for piece in pieces:
        if piece.error or piece.triton_error:
            return piece
    return Piece(
        "".join(piece.text for piece in pieces),
        sum(piece.num_tokens for piece in pieces),
        pieces[-1].finish_reason,
        sum(piece.delay_s for piece in pieces),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        prompt_logprobs=tuple(entry for piece in pieces for entry in piece.prompt_logprobs),
        tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
        embedding=pieces[0].embedding,
        reasoning="".join(piece.reasoning for piece in pieces),
    )
