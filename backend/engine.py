"""The engine: schedule, run, update. It knows sequences of token ids and nothing of text."""

import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from shoal.backend.image_store import ImageStore
from shoal.backend.kv_mover import KVMover
from shoal.backend.messages import AddSequence, CacheStatus, MemoryStatus, WorkerStatus
from shoal.backend.pressure_guard import PressureGuard
from shoal.backend.step_log import StepLog
from shoal.scheduler.outputs import SampledToken, SchedulerOutput, StepOutput
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import FinishReason, PooledStates, Sequence

DISK_WAIT_S = 0.005  # while nothing else can run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Per seq_id: the token of each sequence that sampled, or why its sequence failed or waits."""

    sampled: dict[int, SampledToken]
    failed: dict[int, str]
    deferred: set[int] = field(
        default_factory=set
    )  # not run yet: for want of memory, or of a matcher
    # What each block of the table got, of the sequences whose KV policy goes by it.
    block_mass: dict[int, list[int]] = field(default_factory=dict)
    # Prompt tokens by position, of the sequences that want theirs scored.
    scored: dict[int, dict[int, SampledToken]] = field(default_factory=dict)
    # What was pooled so far, of the sequences that want an embedding.
    pooled: dict[int, PooledStates] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # why a request's own grammar broke
    known_ends: set[int] = field(default_factory=set)  # for which no forward pass ran


class Runner(Protocol):
    """Runs one step on the device."""

    def run(self, output: SchedulerOutput) -> RunResult: ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the loaded model and its KV pool can take."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class Engine:
    """Owns the scheduler and, through it, every live sequence. One thread uses it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: EngineLimits,
        step_log: StepLog | None = None,
        guard: PressureGuard | None = None,
        mover: KVMover | None = None,
        images: ImageStore | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._limits = limits
        self._step_log = step_log
        self._guard = guard
        self._mover = mover
        self._images = images
        self._num_steps = 0
        self._made_progress = True
        self._live: set[int] = set()
        self._refused: list[StepOutput] = []

    def add(self, message: AddSequence) -> None:
        """Take a sequence. One that cannot run gets its error with the next step's outputs."""
        if message.seq_id in self._live:
            logger.warning("sequence %d was added twice; the second is ignored", message.seq_id)
            return
        reason = self._why_refused(message)
        if reason is not None:
            self._refuse(message, reason)
            return
        sequence = Sequence(
            seq_id=message.seq_id,
            token_ids=list(message.token_ids),
            num_prompt_tokens=message.num_prompt_tokens,
            sampling=message.sampling,
            eos_token_ids=self._limits.eos_token_ids,
            cache_salt=message.cache_salt,
            urgency=message.urgency,
            tpot_s=message.tpot_s,
            arrival_step=self._num_steps,
            images=tuple(image.span for image in message.images),
        )
        if self._images is not None:
            self._images.add(sequence.seq_id, message.images)
        self._live.add(sequence.seq_id)
        if message.fork_of is None:
            self._scheduler.add(sequence)
        else:
            self._scheduler.fork(message.fork_of, sequence)
        if self._step_log:
            self._step_log.added(sequence.seq_id)

    def abort(self, seq_id: int) -> None:
        """Drop a sequence and free its blocks, without an output. Unknown ids are ignored."""
        self._refused = [output for output in self._refused if output.seq_id != seq_id]
        if seq_id not in self._live:
            return
        self._live.discard(seq_id)
        self._scheduler.abort(seq_id)
        self._forget_images(seq_id)
        if self._step_log:
            self._step_log.aborted(seq_id)

    def step(self) -> list[StepOutput]:
        """Give every scheduled sequence its tokens; the outputs of one step, refusals first."""
        refused, self._refused = self._refused, []
        if self._guard:
            self._scheduler.limits = self._guard.before_step()
        self._take_from_disk()
        output = self._scheduler.schedule()
        self._made_progress = bool(output.scheduled or output.preempted or refused)
        if not output.scheduled:
            self._move_only(output)
            return refused
        self._num_steps += 1
        if self._step_log:
            self._step_log.planned(output)
        start = time.monotonic()
        result = self._runner.run(output)
        if not result.known_ends:  # what such a step takes says nothing of others
            self._scheduler.note_duration(output, time.monotonic() - start)
        results = self._scheduler.update_from_output(
            output,
            result.sampled,
            result.failed,
            result.deferred,
            result.block_mass,
            result.scored,
            result.pooled,
            result.refused,
        )
        for item in results:
            if item.finish_reason is not None:
                self._live.discard(item.seq_id)
                self._forget_images(item.seq_id)
        if result.known_ends and not (refused or results):  # all wait for their grammars
            self._made_progress = False
        if self._step_log:
            free_blocks = self._scheduler.free_blocks
            self._step_log.finished(
                self._num_steps, output, results, free_blocks, result.known_ends
            )
        return refused + results

    def rest(self) -> None:
        """Nothing is to be done: do now what the next step would have to."""
        if self._guard:
            self._guard.while_idle()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._refused) or self._scheduler.has_unfinished

    @property
    def made_progress(self) -> bool:
        """Whether the last step did anything."""
        return self._made_progress

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(
            step=self._num_steps,
            free_blocks=self._scheduler.free_blocks,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            memory=self._memory_status(),
            cache=CacheStatus(
                cached_blocks=self._scheduler.kv.num_cached_blocks,
                num_query_tokens=self._scheduler.num_query_tokens,
                num_hit_tokens=self._scheduler.num_hit_tokens,
                num_evicted_blocks=self._scheduler.kv.num_evicted_blocks,
            ),
        )

    def _move_only(self, output: SchedulerOutput) -> None:
        """Nothing can run yet: move blocks, and wait a moment for those on their way from disk."""
        if output.transfers:
            self._runner.run(output)
        if self._scheduler.is_loading:
            self._take_from_disk(DISK_WAIT_S)
            self._made_progress = True

    def _take_from_disk(self, wait_s: float = 0.0) -> None:
        if self._mover is not None:
            results = self._mover.take_results(wait_s)
            self._mover.remove(self._scheduler.take_disk_results(results))

    def _forget_images(self, seq_id: int) -> None:
        if self._images is not None:
            self._images.release(seq_id)

    def _memory_status(self) -> MemoryStatus:
        guard, host = self._guard, self._scheduler.kv.host
        prefixes = host.prefixes if host else None
        return MemoryStatus(
            pressure=guard.pressure.value if guard else "calm",
            token_budget=self._scheduler.limits.max_num_tokens,
            num_failed_allocations=guard.num_failed_allocations if guard else 0,
            host_blocks_used=host.pool.num_used if host else 0,
            host_blocks_total=host.pool.num_total if host else 0,
            disk_blocks=prefixes.num_on_disk if prefixes is not None else 0,
            num_checkpoints=host.num_checkpoints if host else 0,
            num_restores=host.num_restores if host else 0,
            num_demoted_blocks=prefixes.num_demoted if prefixes is not None else 0,
            num_promoted_blocks=prefixes.num_restored if prefixes is not None else 0,
        )

    def _why_refused(self, message: AddSequence) -> str | None:
        """Intake has checked all this for clients; here it guards the device and the pool."""
        num_tokens = len(message.token_ids)
        if not 0 < message.num_prompt_tokens <= num_tokens:
            return "The sequence has no prompt."
        if num_tokens >= self._limits.max_model_len:
            return f"The sequence leaves no room within {self._limits.max_model_len} tokens."
        if not 0 <= min(message.token_ids) <= max(message.token_ids) < self._limits.vocab_size:
            return f"Token ids must be in [0, {self._limits.vocab_size - 1}]."
        if message.images and self._images is None:
            return "This model takes no images."
        if any(image.span.stop > message.num_prompt_tokens for image in message.images):
            return "An image lies beyond the prompt."
        return None

    def _refuse(self, message: AddSequence, reason: str) -> None:
        output_index = max(0, len(message.token_ids) - message.num_prompt_tokens)
        self._refused.append(
            StepOutput(
                message.seq_id,
                output_index,
                token=None,
                finish_reason=FinishReason.ERROR,
                error=reason,
            )
        )
