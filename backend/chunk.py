"""A piece of one request's answer, on its way from the dispatch thread to the client."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.scheduler.errors import RequestError
from shoal.scheduler.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could stand at one position, with its log-probability."""

    token_id: int
    text: str
    logprob: float | None  # None: of a prompt's first token
    rank: int | None  # 1: the most likely; None: not among those asked for
    token_bytes: bytes = b""  # may be a part of a character, which ``text`` cannot show


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The sampled token and its alternatives (best first; the sampled one may be among them).

    The sampled token's text is what it added to the output: nothing if it ends inside a character.
    """

    sampled: Alternative
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What one call of a tool gained. A call's first delta has its id and name."""

    index: int  # of the choice's calls
    arguments: str = ""  # joined, they are a JSON object
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)  # frozen, one would take three times as long to make
class Chunk:
    """What one choice of a request gained since its last chunk: deltas, except where a comment
    says otherwise.

    Each choice gets exactly one chunk with a ``finish_reason``, and it is its last one; a request
    gets exactly one final chunk, the very last, which is of the choice that finished last, or says
    why the whole request ends.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()  # every sampled token, an end-of-text one too
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens of ``text``
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of all the prompt's tokens, once
    tool_calls: tuple[ToolCallDelta, ...] = ()
    embedding: tuple[float, ...] = ()  # of the prompt, once, of length 1
    reasoning: str = ""  # what the model thinks, before its answer
    cumulative_logprob: float | None = None  # of the whole output so far
    num_input_tokens: int = 0  # of the whole request; 0 until it is tokenised
    cached_tokens: int = 0  # of the whole request
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    index: int | None = None  # which choice, of a request for several; None: of all
    is_last: bool = True  # with a finish reason: no other choice goes on

    @property
    def final(self) -> bool:
        return self.finish_reason is not None and self.is_last

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of_error(cls, error: RequestError, num_input_tokens: int = 0) -> "Chunk":
        """The last chunk of a request that failed."""
        return cls(finish_reason=FinishReason.ERROR, error=error, num_input_tokens=num_input_tokens)


def join_by_choice(chunks: Sequence[Chunk]) -> list[Chunk]:
    """One chunk for each choice, in the order of first mention; or, where the whole request ends at
    once, the one that says so."""
    if len(chunks) == 1:
        return [*chunks]
    by_index: dict[int | None, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    if None in by_index and len(by_index) > 1:
        return [join_chunks(by_index[None])]
    return [join_chunks(same) for same in by_index.values()] or [Chunk()]


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk that says what ``chunks``, all of one choice and in order, said. No chunks make an
    empty one."""
    if len(chunks) <= 1:
        return chunks[0] if chunks else Chunk()
    last = chunks[-1]
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt_logprobs=tuple(entry for chunk in chunks for entry in chunk.prompt_logprobs),
        embedding=next((chunk.embedding for chunk in chunks if chunk.embedding), ()),
        tool_calls=tuple(call for chunk in chunks for call in chunk.tool_calls),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        cumulative_logprob=last.cumulative_logprob,
        num_input_tokens=max(chunk.num_input_tokens for chunk in chunks),
        cached_tokens=max(chunk.cached_tokens for chunk in chunks),
        finish_reason=last.finish_reason,
        error=last.error,
        index=last.index,
        is_last=last.is_last,
    )
