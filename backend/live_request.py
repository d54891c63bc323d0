"""A request between its submission and its last chunk, and the chunks made of its tokens."""

from dataclasses import dataclass

from shoal.backend.chunk import Chunk
from shoal.backend.orders import Sink
from shoal.backend.text.output_processor import OutputProcessor, TextDelta
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

    def chunk(self, token: SampledToken | None, delta: TextDelta) -> Chunk:
        """What its client gets for a token and the text that came of it."""
        assert self.processor is not None
        return Chunk(
            text=delta.text,
            token_ids=() if token is None else (token.token_id,),
            logprobs=delta.logprobs,
            cumulative_logprob=self.processor.cumulative_logprob if self.wants_logprobs else None,
            num_input_tokens=self.num_input_tokens,
            cached_tokens=self.cached_tokens,
            finish_reason=delta.finish_reason,
        )
