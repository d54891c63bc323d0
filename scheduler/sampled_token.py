"""A token with what the model thought of it."""

from dataclasses import dataclass


@dataclass(slots=True, unsafe_hash=True)  # frozen, one would take three times as long to make
class SampledToken:
    """A sampled token; logprobs only when the sequence asked for them."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), best first
