"""One sequence: its tokens, how far they are computed, and where its KV blocks lie."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from shoal.scheduler.images import ImageSpan, cache_keys
from shoal.scheduler.sampled_token import SampledToken
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.session_eviction import SessionEviction

# Tokens of a prompt to score that one step may compute: each gives a row of logits.
MAX_SCORED_TOKENS = 128


class SequenceStatus(IntEnum):
    """Ordered, so that ``status >= FINISHED`` is the one test for finished."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"  # a stop after calls of tools; said by the text side alone


@dataclass(frozen=True, slots=True)
class PooledStates:
    """The sum of the final hidden states of a prompt's first ``num_tokens`` tokens (mean), or the
    last one's (last)."""

    num_tokens: int
    values: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its growing output, inside one worker.

    Owned by the engine thread. ``token_ids`` holds the prompt, then the output; a sequence replayed
    after a crash arrives with part of its output already there. ``num_computed_tokens`` chases
    ``num_tokens``: prefill, chunked prefill, decode and recompute are all that one rule.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: bytes = b""  # who may share its prefix: equal salts alone meet in the cache
    urgency: int = 0  # of its prefill: 1 goes before others, -1 yields to what may come
    tpot_s: float | None = None  # steps in which it decodes should be no longer
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_preemptions: int = 0
    block_tables: list[list[int]] = field(default_factory=lambda: [[]])  # one a KV group
    arrival_index: int = 0  # of the order in which the worker's sequences arrived
    arrival_step: int = 0  # engine step number at which the worker received it
    eviction: SessionEviction | None = None  # with a lossy kv_policy only
    num_evicted_tokens: int = 0  # of the computed ones, dropped from the block table
    # With keys and values in the table: the last token may have them before its logits are known.
    num_present_tokens: int = 0
    prompt_logprobs: dict[int, SampledToken] = field(default_factory=dict)  # by position
    pooled: PooledStates | None = None  # where an embedding is wanted
    images: tuple[ImageSpan, ...] = ()  # of the prompt, in order
    only_likeliest: bool = field(init=False)  # as ``SamplingParams`` has it; asked in each step

    def __post_init__(self) -> None:
        self.only_likeliest = self.sampling.only_likeliest
        assert 0 < self.num_prompt_tokens <= len(self.token_ids)

    @property
    def block_table(self) -> list[int]:
        """The table of the first KV group, which holds all tokens."""
        return self.block_tables[0]

    @property
    def cache_keys(self) -> list[int]:
        """What the prefix cache knows its tokens by; not to be changed."""
        return cache_keys(self.token_ids, self.images)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of its prompt's tokens are wanted: none may come from a cache."""
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether something is wanted of each of its prompt's tokens, which no cache has."""
        pools_all = self.sampling.pooling == "mean" and self.num_output_tokens == 0
        return self.scores_prompt or pools_all

    @property
    def num_runnable_tokens(self) -> int:
        """The uncomputed tokens that one step may compute: all that a lossy policy has room for."""
        num_tokens = len(self.token_ids) - self.num_computed_tokens
        if num_tokens > MAX_SCORED_TOKENS and (
            self.sampling.prompt_logprobs is not None or self.sampling.pooling == "mean"
        ):
            num_tokens = MAX_SCORED_TOKENS
        if self.eviction is None:
            return num_tokens
        return min(num_tokens, self.eviction.room(self.num_held_tokens))

    @property
    def num_held_tokens(self) -> int:
        """Tokens with keys and values in the cache: where, in the table, the next one goes."""
        return self.num_computed_tokens - self.num_evicted_tokens

    @property
    def is_finished(self) -> bool:
        return self.status >= SequenceStatus.FINISHED
