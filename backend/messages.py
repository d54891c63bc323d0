"""Messages between the dispatcher (in the Triton stub) and a worker, as msgpack over a socket pair.

One tagged union each way; both ends decode with a typed decoder, so nothing is ever unpickled.
"""

from typing import Self

import msgspec

from shoal.scheduler.images import PromptImage
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.sampling_params import SamplingParams


class AddSequence(msgspec.Struct, frozen=True, tag=True):
    """Run this sequence. ``token_ids`` may already hold outputs (replay after a crash).

    ``fork_of`` is the seq_id of one that it begins like; what they share is computed once while
    that one is there.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: bytes = b""
    urgency: int = 0
    tpot_s: float | None = None
    fork_of: int | None = None
    images: tuple[PromptImage, ...] = ()  # of the prompt, in order


class AbortSequence(msgspec.Struct, frozen=True, tag=True):
    """Stop this sequence and free what it holds. Unknown ids are ignored. No reply is sent."""

    seq_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave at once."""


ToWorker = AddSequence | AbortSequence | Shutdown


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """A phase of start-up; ``done`` and ``total`` are bytes, 0 where a phase has none."""

    phase: str
    done: int = 0
    total: int = 0


class ParityReport(msgspec.Struct, frozen=True):
    """What the self-test at start-up found; see ``backend.self_test``."""

    ok: bool | None  # None: it could not run
    num_prompts: int = 0
    num_tokens: int = 0  # rows of logits compared
    num_equal: int = 0  # bit for bit
    num_wrong: int = 0  # greedy tokens that differ although the two best lie apart
    worst_difference: float = 0.0  # standard deviations of a row of logits
    tolerance: float = 0.0
    detail: str = ""


class ImageForm(msgspec.Struct, frozen=True):
    """How a model takes images. A text has ``placeholder_id``'s text where one goes; tokens are
    ``margin``, begin, the image's own, end, ``margin``.

    An image is of ``max_tokens`` tokens, or with a ``patch_size`` of as many as its shape fills.
    """

    placeholder_id: int
    image_token_id: int
    begin_token_id: int
    end_token_id: int
    max_tokens: int
    margin: str = ""
    both_ways: bool = False  # an image's tokens see each other both ways
    patch_size: int | None = None  # pixels a side
    pooling: int = 1  # patches a side of a token


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and a first step has run."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    kernels: str = "reference"
    runner: str = "custom"
    max_num_batched_tokens: int | None = None
    parity: ParityReport | None = None  # None: no self-test was asked for
    images: ImageForm | None = None  # None: the model takes text only
    hidden_size: int = 0  # the most dimensions of an embedding; 0: unknown


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot start, for a reason its operator can act on."""

    message: str


class _Totalled(msgspec.Struct, frozen=True):
    """Of a worker; fields named ``num_`` are totals."""

    def with_totals_of(self, before: Self) -> Self:
        """This worker's state, with the totals of those before it added."""
        names = [name for name in self.__struct_fields__ if name.startswith("num_")]
        totals = {name: getattr(self, name) + getattr(before, name) for name in names}
        return msgspec.structs.replace(self, **totals)


class MemoryStatus(_Totalled, frozen=True):
    """How short the memory is that steps need, and what failed for want of it."""

    pressure: str = "calm"  # calm, high or critical
    token_budget: int = 0  # of a step; lower than configured while memory is short
    num_failed_allocations: int = 0
    host_blocks_used: int = 0  # KV blocks in host memory
    host_blocks_total: int = 0
    disk_blocks: int = 0
    num_checkpoints: int = 0  # preempted sequences that were copied to the host
    num_restores: int = 0  # and back
    num_demoted_blocks: int = 0  # of cached prefixes, to the host
    num_promoted_blocks: int = 0  # and back


class CacheStatus(_Totalled, frozen=True):
    """The cache of prefixes."""

    cached_blocks: int = 0
    num_query_tokens: int = 0  # of new sequences, looked up
    num_hit_tokens: int = 0  # of these, found
    num_evicted_blocks: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, tag=True):
    """Headroom and progress, after every step or two and at least every 50 ms while idle."""

    step: int
    free_blocks: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    memory: MemoryStatus = MemoryStatus()
    cache: CacheStatus = CacheStatus()


class StepResults(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one step or two in one message, with the status after it."""

    outputs: list[StepOutput]
    status: WorkerStatus


FromWorker = LoadProgress | WorkerReady | LoadFailed | WorkerStatus | StepResults
