"""A request between its submission and its last chunk, and the chunks made of its tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.backend.chunk import Chunk, TokenLogprobs
from shoal.backend.orders import Sink
from shoal.backend.text.output_processor import OutputProcessor, TextDelta
from shoal.backend.text.token_logprobs import describe_prompt
from shoal.backend.text.tokenizer import Tokenizer
from shoal.scheduler.dispatched import Delivery


def normalized(values: Sequence[float], dimensions: int | None) -> tuple[float, ...]:
    """The first ``dimensions`` of them, as a vector of length 1."""
    kept = values[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in kept))
    return tuple(value / length for value in kept) if length else tuple(kept)


@dataclass(slots=True)
class LiveRequest:
    """Owned by the dispatch loop, under the seq_id of its first choice."""

    seq_id: int
    sink: Sink
    submitted_at: float  # monotonic
    choices: list["LiveChoice"] = field(default_factory=list)  # empty: not prepared yet
    num_input_tokens: int = 0
    scored_token_ids: list[int] = field(default_factory=list)  # the prompt, where it is scored
    prompt_text: str = ""  # the same
    cached_tokens: int = 0

    @property
    def has_unfinished_choices(self) -> bool:
        return any(choice.processor.finish_reason is None for choice in self.choices)


@dataclass(slots=True)
class LiveChoice:
    """One of the answers to a request: one sequence."""

    request: LiveRequest
    seq_id: int
    processor: OutputProcessor
    index: int | None  # None: the only one
    wants_logprobs: bool
    dimensions: int | None = None  # of an embedding

    def plain_chunk(self, deliveries: Sequence[Delivery]) -> Chunk | None:
        """What its client gets for news, in order, that are tokens and nothing else; None, and no
        change, where there is more to them."""
        request = self.request
        if not self.processor.is_plain or request.scored_token_ids:
            return None
        for delivery in deliveries:
            if delivery.finish_reason is not None or delivery.token is None or delivery.embedding:
                return None
        token_ids = tuple([d.token.token_id for d in deliveries if d.token is not None])
        return Chunk(
            self.processor.push_plain(token_ids),
            token_ids,
            num_input_tokens=request.num_input_tokens,
            cached_tokens=request.cached_tokens,
            index=self.index,
            is_last=False,
        )

    def chunk(self, delivery: Delivery, delta: TextDelta, tokenizer: Tokenizer) -> Chunk:
        """What its client gets for news from the worker and the text that came of it."""
        token = delivery.token
        return Chunk(
            text=delta.text,
            token_ids=() if token is None else (token.token_id,),
            logprobs=delta.logprobs,
            tool_calls=delta.tool_calls,
            reasoning=delta.reasoning,
            embedding=normalized(delivery.embedding, self.dimensions),
            prompt_logprobs=self._prompt_logprobs(delivery, tokenizer),
            cumulative_logprob=self.processor.cumulative_logprob if self.wants_logprobs else None,
            num_input_tokens=self.request.num_input_tokens,
            cached_tokens=self.request.cached_tokens,
            finish_reason=delta.finish_reason,
            index=self.index,
            is_last=not self.request.has_unfinished_choices,
        )

    def _prompt_logprobs(
        self, delivery: Delivery, tokenizer: Tokenizer
    ) -> tuple[TokenLogprobs, ...]:
        """With the first news, and only then."""
        token_ids = self.request.scored_token_ids
        if not token_ids:
            return ()
        self.request.scored_token_ids = []
        return describe_prompt(
            tokenizer, token_ids, delivery.prompt_logprobs, self.request.prompt_text
        )
