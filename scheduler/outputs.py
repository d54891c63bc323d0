"""What one engine step was asked to do, and what came of it."""

from dataclasses import dataclass, field

from shoal.scheduler.return_cost import ReturnPlan, ReturnWay
from shoal.scheduler.sampled_token import SampledToken as SampledToken
from shoal.scheduler.sequence import FinishReason, Sequence
from shoal.scheduler.transfers import Transfer


@dataclass(slots=True)  # frozen, one would take three times as long to make
class ScheduledSequence:
    """``num_tokens`` tokens of ``sequence``, from ``num_computed_tokens`` on, run in this step.

    Blocks for them are already in the sequence's block table. ``samples``: the step reaches the
    last known token, so that a next one must be sampled.
    """

    sequence: Sequence
    num_tokens: int
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.num_tokens == self.sequence.num_uncomputed_tokens

    @property
    def only_lacks_logits(self) -> bool:
        """Whether this is the last known token alone, with keys and values in the cache."""
        is_last = self.samples and self.num_tokens == 1
        return is_last and self.sequence.num_tokens == self.sequence.num_present_tokens


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence lost its device blocks, and how it is to get their contents again."""

    seq_id: int
    plan: ReturnPlan


@dataclass(frozen=True, slots=True)
class Restored:
    """A sequence got ``num_tokens`` tokens' KV from the host: its own checkpoint, or a prefix."""

    seq_id: int
    way: ReturnWay
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: scheduled sequences in batch order (running before newly admitted).

    The transfers come first, in their order, also in a step that schedules nothing.
    """

    scheduled: tuple[ScheduledSequence, ...]
    preemptions: tuple[Preemption, ...] = ()
    restored: tuple[Restored, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @property
    def preempted(self) -> tuple[int, ...]:
        """The seq_ids that lost their blocks in this step."""
        return tuple(preemption.seq_id for preemption in self.preemptions)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def num_decodes(self) -> int:
        """Sequences that run one token."""
        return sum(item.num_tokens == 1 for item in self.scheduled)


@dataclass(slots=True)  # frozen, one would take three times as long to make
class StepOutput:
    """What one sequence gained in one step: a token, a finish, or both.

    ``output_index`` is the token's index among the sequence's outputs; a receiver that was told of
    a token before (replay) drops it by this index.
    """

    seq_id: int
    output_index: int
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None  # the request's field that is at fault; None: the server is
    prompt_logprobs: tuple[SampledToken, ...] = ()  # of the prompt's tokens but the first, once
    embedding: tuple[float, ...] = ()  # of the prompt, once, where it is wanted
