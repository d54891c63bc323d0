"""A request between its submission and its last chunk, and the chunks made of its tokens."""

from dataclasses import dataclass

from shoal.backend.chunk import Alternative, Chunk, TokenLogprobs
from shoal.backend.orders import Sink
from shoal.backend.text.output_processor import OutputProcessor, TextDelta
from shoal.backend.text.tokenizer import Tokenizer
from shoal.scheduler.outputs import SampledToken


@dataclass(slots=True)
class LiveRequest:
    """Owned by the dispatch loop."""

    sink: Sink
    submitted_at: float  # monotonic
    processor: OutputProcessor | None = None  # None: not prepared yet
    num_input_tokens: int = 0
    cached_tokens: int = 0
    wants_logprobs: bool = False

    def chunk(self, token: SampledToken | None, delta: TextDelta, tokenizer: Tokenizer) -> Chunk:
        """What its client gets for a token and the text that came of it."""
        assert self.processor is not None
        wants_logprobs = self.wants_logprobs and token is not None
        return Chunk(
            text=delta.text,
            token_ids=() if token is None else (token.token_id,),
            logprobs=(_logprobs(token, tokenizer),) if wants_logprobs and token is not None else (),
            cumulative_logprob=self.processor.cumulative_logprob if self.wants_logprobs else None,
            num_input_tokens=self.num_input_tokens,
            cached_tokens=self.cached_tokens,
            finish_reason=delta.finish_reason,
        )


def _logprobs(token: SampledToken, tokenizer: Tokenizer) -> TokenLogprobs:
    top = tuple(
        Alternative(token_id, tokenizer.decode([token_id]), logprob, rank)
        for rank, (token_id, logprob) in enumerate(token.top_logprobs, start=1)
    )
    same = next((item for item in top if item.token_id == token.token_id), None)
    if same is not None:
        return TokenLogprobs(same, top)
    text = tokenizer.decode([token.token_id])
    assert token.logprob is not None
    return TokenLogprobs(Alternative(token.token_id, text, token.logprob, None), top)
