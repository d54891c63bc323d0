"""The iteration scheduler: which tokens of which sequences run in the next step."""

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from shoal.scheduler.errors import context_exceeded
from shoal.scheduler.fork_blocks import copy_last_block, fork_blocks
from shoal.scheduler.forks import Fork, Forks
from shoal.scheduler.kv_manager import KVCacheManager
from shoal.scheduler.outputs import (
    Preemption,
    Restored,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    StepOutput,
)
from shoal.scheduler.sequence import FinishReason, PooledStates, Sequence, SequenceStatus
from shoal.scheduler.session_eviction import make_session_eviction
from shoal.scheduler.step_budget import share_budget, some_wait
from shoal.scheduler.step_limits import StepLimits
from shoal.scheduler.step_pace import StepPace
from shoal.scheduler.transfers import DeviceCopy, DiskResult
from shoal.scheduler.victims import choose_victim

_NONE_FAILED: Mapping[int, str] = {}
_NONE_SCORED: Mapping[int, Mapping[int, SampledToken]] = {}
_NONE_POOLED: Mapping[int, PooledStates] = {}
_NO_MASS: Mapping[int, SequenceOf[int]] = {}


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence. Raises ValueError when they cannot work together."""

    max_num_seqs: int
    max_num_batched_tokens: int  # the token budget of one step
    max_model_len: int  # prompt and output together
    decode_stretch: float = 1.8  # times as long prompts may make a step for those that decode

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_model_len < 2:
            raise ValueError("max_num_seqs must be at least 1 and max_model_len at least 2.")
        if self.decode_stretch < 1:
            raise ValueError("decode_stretch must be at least 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be at least max_num_seqs, so that every running "
                "sequence can decode in each step."
            )


class Scheduler:
    """Lets ``num_computed_tokens`` of every sequence chase its ``num_tokens``, step by step.

    There is no prefill or decode phase. Each step:

    1. **Admit** waiting sequences in arrival order while a slot is free and the blocks of all
       their known tokens, and of the next, fit beside what the running ones still lack.
    2. **Share** the token budget: see ``share_budget``. Decodes come first, then urgent prefills;
       a short prompt never waits behind a long one, and a long one never starves behind short
       ones. Beside urgent prefills the others get a part of every second step.
    3. **Allocate** blocks in arrival order. When they run out, a victim loses its blocks: the
       sequence for which it costs the least to get their contents again, from the host or by
       computing them (``choose_victim``). It waits in its place by arrival.

    Where memory is so short that ``limits`` allow fewer tokens than sequences run, they take turns.

    **Progress.** The earliest running sequence is never a victim, gets at least one token in each
    step, or turn, or second step beside urgent ones, and the pool holds it at its longest. So it
    ends, unless an earlier one is admitted and takes its place; and the earliest of all stays the
    earliest until it ends, once it runs. While it waits, nobody who came later is admitted (but for
    the second at most that blocks may take to come from disk), so the running ones end until it
    fits. Hence all end, in turn.

    **Churn is bounded.** Call slack the free blocks less those that running sequences lack for
    their known tokens. Admission leaves it at 0 or more; a preemption, which happens only below 0,
    raises it by 1 or more; and only a sampled token that needs a new block lowers it, by 1. So
    there is at most one preemption for each block of sampled tokens, and one for each sequence's
    first. In practice far fewer: a preempted sequence comes back only beside a spare block for each
    running one. Each preemption adds once more to a victim's price, so that the loss goes round.

    Owned by the engine thread.
    """

    # Arrival order is the order of add(), and both lists keep it.

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        if config.max_model_len > kv.max_num_tokens:
            raise ValueError(f"max_model_len must be at most {kv.max_num_tokens}: the KV pool.")
        most_running = kv.max_num_running(config.max_num_batched_tokens)
        if most_running == 0:
            raise ValueError(
                "The pool of a sliding window cannot hold a window and a step's tokens."
            )
        self.config = config
        self.kv = kv
        self._max_num_running = min(config.max_num_seqs, most_running or config.max_num_seqs)
        self.pace = StepPace()  # better one that was measured
        self.num_preemptions = 0
        self.num_query_tokens = 0  # of new sequences, looked up among the cached prefixes
        self.num_hit_tokens = 0  # of these, found
        self.limits = StepLimits(config.max_num_batched_tokens)  # lower while memory is short
        self._turn = 0
        self._some_wait = False  # for urgent prompts, in the latest step
        self._num_arrivals = 0
        self._live: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._forks = Forks()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._forks.num_held

    @property
    def free_blocks(self) -> int:
        return self.kv.num_free_blocks

    def add(self, sequence: Sequence) -> None:
        """Take over a new sequence. Raises RequestError when it leaves no room for a token."""
        self._take_over(sequence)
        self._waiting.append(sequence)

    def fork(self, parent_seq_id: int, child: Sequence) -> None:
        """Take over a new sequence that begins as another one does.

        What they have in common is computed once, if the other one is still there by then. A
        lossy sequence shares nothing, as what it drops depends on what it computed itself; nor does
        one whose prompt is scored, as that takes the whole computation.
        Raises as ``add``.
        """
        parent = self._live.get(parent_seq_id)
        apart = _is_lossy(child) or child.needs_whole_prompt
        if parent is None or apart or _is_lossy(parent):
            self.add(child)
            return
        self._take_over(child)
        self._forks.hold(Fork.of(parent, child))
        self._wait(self._forks.release_ready(parent))

    def _take_over(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._live, f"sequence {sequence.seq_id} was added twice"
        if sequence.num_tokens >= self.config.max_model_len:
            what = f"The prompt has {sequence.num_tokens}: shorten it."
            raise context_exceeded(self.config.max_model_len, what)
        sequence.arrival_index = self._num_arrivals
        self._num_arrivals += 1
        if sequence.sampling.kv_budget is not None:
            sequence.eviction = make_session_eviction(
                sequence.sampling.kv_policy, sequence.sampling.kv_budget, self.kv.block_size
            )
        self._live[sequence.seq_id] = sequence

    def abort(self, seq_id: int) -> bool:
        """Drop a sequence and free its blocks; False when it is not here (any more)."""
        sequence = self._live.get(seq_id)
        if sequence is None:
            return False
        self._finish(sequence, FinishReason.CANCELLED)
        return True

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and allocate its blocks. Empty only when nothing is live."""
        if self.kv.windows:
            for sequence in self._running:
                self.kv.drop_behind_windows(sequence)
        restored = self._admit(tuple(self._waiting))
        num_tokens = self._share_budget()
        preemptions = self._allocate(num_tokens)
        if not num_tokens and self._some_wait:  # the urgent lost their blocks: the others' turn
            num_tokens = self._share_budget()
            preemptions += self._allocate(num_tokens)
        scheduled = tuple(
            ScheduledSequence(sequence, num_tokens[sequence.seq_id])
            for sequence in self._running
            if sequence.seq_id in num_tokens
        )
        transfers = self.kv.take_transfers()
        return SchedulerOutput(scheduled, tuple(preemptions), tuple(restored), transfers)

    def update_from_output(
        self,
        output: SchedulerOutput,
        sampled: Mapping[int, SampledToken],
        failed: Mapping[int, str] = _NONE_FAILED,
        deferred: Collection[int] = (),
        block_mass: Mapping[int, SequenceOf[int]] = _NO_MASS,
        scored: Mapping[int, Mapping[int, SampledToken]] = _NONE_SCORED,
        pooled: Mapping[int, PooledStates] = _NONE_POOLED,
        refused: Mapping[int, str] = _NONE_FAILED,
    ) -> list[StepOutput]:
        """Apply what the step computed, by seq_id. Failed, refused (their grammar is at fault) and
        finished sequences are freed; of the deferred ones nothing was computed, and they are
        scheduled again."""
        outputs = []
        for item in output.scheduled:
            sequence, seq_id = item.sequence, item.sequence.seq_id
            if sequence.is_finished or seq_id in deferred:  # or aborted meanwhile
                continue
            if seq_id in failed:
                outputs.append(self._fail(sequence, failed[seq_id]))
                continue
            if seq_id in refused:
                param = sequence.sampling.grammar_param
                outputs.append(self._fail(sequence, refused[seq_id], param))
                continue
            sequence.num_computed_tokens += item.num_tokens
            if seq_id in block_mass and sequence.eviction is not None:
                sequence.eviction.observe(block_mass[seq_id])
            if seq_id in scored:
                sequence.prompt_logprobs.update(scored[seq_id])
            if seq_id in pooled:
                sequence.pooled = pooled[seq_id]
            if self._forks.has_held:
                self._start_forks(sequence)
            if item.samples:
                outputs.append(self._append(sequence, sampled[seq_id]))
        return outputs

    def note_duration(self, output: SchedulerOutput, seconds: float) -> None:
        """A step that was just run, and is not applied yet, took so long: what the lengths of later
        steps go by."""
        prefills = [item for item in output.scheduled if item.num_tokens > 1]
        work = sum(
            item.num_tokens * self.pace.work_of_token(item.sequence.num_computed_tokens)
            for item in prefills
        )
        self.pace.note(len(output.scheduled) - len(prefills), work, seconds)

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way from disk."""
        prefixes = self.kv.host.prefixes if self.kv.host else None
        return prefixes is not None and prefixes.num_loading > 0

    def take_disk_results(self, results: Iterable[DiskResult]) -> list[bytes]:
        """Note what the disk has done; returns the digests of blocks to remove from it."""
        return self.kv.host.take_disk_results(results) if self.kv.host else []

    def check_integrity(self) -> None:
        """Assert that lists, statuses, limits and blocks agree. For tests; costs O(blocks)."""
        assert len(self._running) <= self._max_num_running
        held = list(self._forks.held())
        assert all(not any(sequence.block_tables) for sequence in held)
        members = [*self._running, *self._waiting, *held]
        assert len(members) == len(self._live)
        for sequence in members:
            assert self._live[sequence.seq_id] is sequence
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens
            assert sequence.num_tokens < self.config.max_model_len
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in self._running)
        for sequence in self._waiting:
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert not any(sequence.block_tables)
        arrivals = [sequence.arrival_index for sequence in self._running]
        assert arrivals == sorted(arrivals)
        arrivals = [sequence.arrival_index for sequence in self._waiting]
        assert arrivals == sorted(arrivals)
        self.kv.check_integrity(self._running)
        if self.kv.host is not None:
            self.kv.host.pool.check_integrity(self._live)

    def _start_forks(self, parent: Sequence) -> None:
        """Let the parent's children run from what it has computed, before it may be gone."""
        children = self._forks.release_ready(parent)
        if children:
            self._wait(children)
            self._admit(children)

    def _wait(self, sequences: SequenceOf[Sequence]) -> None:
        """Put sequences that were held among the waiting."""
        for sequence in sequences:
            insort(self._waiting, sequence, key=_arrival)

    def _admit(self, candidates: SequenceOf[Sequence]) -> list[Restored]:
        """Let waiting sequences run, in order, while there are slots and blocks."""
        restored: list[Restored] = []
        if not candidates:
            return restored
        spare = self.kv.num_free_blocks - sum(
            self.kv.num_missing_blocks(sequence, sequence.num_tokens) for sequence in self._running
        )
        for sequence in candidates:
            if len(self._running) >= self._max_num_running:
                break
            if self._running and not self.limits.admits:
                break
            fork = self._forks.usable_for(sequence)
            if fork is None and self.kv.is_loading(sequence):
                continue
            num_free_before = self.kv.num_free_blocks
            copies: list[DeviceCopy] = []
            if fork is None:
                self.kv.attach_prefix(sequence)
            else:
                copies = fork_blocks(self.kv, fork.parent, sequence, fork.num_shared)
            spare -= num_free_before - self.kv.num_free_blocks  # cached blocks it now locks
            num_blocks = self.kv.num_missing_blocks(sequence, sequence.num_tokens + 1)
            # A preempted sequence also leaves a block for each running one to grow into; else it
            # would soon be preempted again, with its recompute wasted.
            margin = len(self._running) if sequence.status is SequenceStatus.PREEMPTED else 0
            if num_blocks + margin > spare:
                self.kv.free(sequence, cache=False)
                sequence.num_computed_tokens = 0
                break
            came_back = self.kv.bring_back(sequence) if fork is None else None
            if came_back is not None:
                restored.append(came_back)
            elif fork is None:
                copies = copy_last_block(self.kv, sequence)
            if sequence.status is SequenceStatus.WAITING:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self.num_query_tokens += sequence.num_tokens
                self.num_hit_tokens += sequence.num_cached_tokens
            spare -= num_blocks
            self._waiting.remove(sequence)
            self.kv.order_copies(copies)
            self._forks.started(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self._running, sequence, key=_arrival)
        return restored

    def _share_budget(self) -> dict[int, int]:
        """Tokens to run, by seq_id. See step 2 of the class docstring."""
        whole_budget = min(self.config.max_num_batched_tokens, self.limits.max_num_tokens)
        members = self._take_turns(whole_budget)
        for sequence in members:
            if sequence.eviction is not None:
                self.kv.make_room(sequence)
        stretch = self.config.decode_stretch
        # Whose turn it is has waited for that already.
        have_waited = self._some_wait or len(members) < len(self._running)
        num_tokens = share_budget(members, whole_budget, self.pace, stretch, have_waited)
        self._some_wait = len(num_tokens) < len(members) and some_wait(members, num_tokens)
        return num_tokens

    def _take_turns(self, most: int) -> list[Sequence]:
        """The running sequences, in arrival order; at most ``most``, and the others next time."""
        if len(self._running) <= most:
            return self._running
        start = self._turn % len(self._running)
        self._turn = start + most
        chosen = set((self._running[start:] + self._running[:start])[:most])
        return [sequence for sequence in self._running if sequence in chosen]

    def _allocate(self, num_tokens: dict[int, int]) -> list[Preemption]:
        """Allocate blocks for ``num_tokens``; takes out of it what had to be preempted."""
        preemptions: list[Preemption] = []
        for sequence in tuple(self._running):
            while (count := num_tokens.get(sequence.seq_id)) is not None:
                if self.kv.has_slots(sequence, count):
                    break
                if self.kv.allocate_slots(sequence, count) is not None:
                    break
                victim = choose_victim(self._running, sequence, self.kv.return_plan)
                num_tokens.pop(victim.seq_id, None)
                preemptions.append(self._preempt(victim))
        return preemptions

    def _preempt(self, victim: Sequence) -> Preemption:
        """Take a running sequence's blocks; among the waiting it keeps its place by arrival."""
        self._running.remove(victim)
        plan = self.kv.preempt(victim)
        victim.num_preemptions += 1
        victim.status = SequenceStatus.PREEMPTED
        insort(self._waiting, victim, key=_arrival)
        self.num_preemptions += 1
        return Preemption(victim.seq_id, plan)

    def _append(self, sequence: Sequence, token: SampledToken) -> StepOutput:
        output_index = sequence.num_output_tokens
        if output_index == 0:
            return self._append_first(sequence, token)
        sequence.token_ids.append(token.token_id)
        reason = self._finish_reason(sequence, token.token_id)
        if reason is not None:
            self._finish(sequence, reason)
        return StepOutput(sequence.seq_id, output_index, token, reason, sequence.num_cached_tokens)

    def _append_first(self, sequence: Sequence, token: SampledToken) -> StepOutput:
        """With it goes all that is wanted of the prompt, which is computed whole."""
        self.kv.publish_prefix(sequence)
        output = StepOutput(
            sequence.seq_id,
            0,
            token,
            num_cached_tokens=sequence.num_cached_tokens,
            prompt_logprobs=_take_scores(sequence),
            embedding=_take_embedding(sequence),
        )
        if sequence.sampling.max_tokens == 0:  # the prompt was all that was wanted
            output.token, output.finish_reason = None, FinishReason.LENGTH
        else:
            sequence.token_ids.append(token.token_id)
            output.finish_reason = self._finish_reason(sequence, token.token_id)
        if output.finish_reason is not None:
            self._finish(sequence, output.finish_reason)
        return output

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling, num_outputs = sequence.sampling, sequence.num_output_tokens
        if num_outputs >= sampling.min_tokens:
            if token_id in sequence.eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP
        if sampling.max_tokens is not None and num_outputs >= sampling.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.token_ids) >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    def _fail(self, sequence: Sequence, message: str, param: str | None = None) -> StepOutput:
        self._finish(sequence, FinishReason.ERROR)
        return StepOutput(
            sequence.seq_id,
            sequence.num_output_tokens,
            None,
            FinishReason.ERROR,
            sequence.num_cached_tokens,
            message,
            param,
        )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one way out: leave every list, free the blocks (a failed one's are not cached)."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif not self._forks.drop_held(sequence):
            self._waiting.remove(sequence)
        heir = self._forks.finished(sequence)
        if heir is not None:
            self._wait([heir])
        del self._live[sequence.seq_id]
        self.kv.free(sequence, cache=reason is not FinishReason.ERROR, finished=True)
        self.kv.forget(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason


def _is_lossy(sequence: Sequence) -> bool:
    return sequence.sampling.kv_budget is not None


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival_index


def _take_embedding(sequence: Sequence) -> tuple[float, ...]:
    """What was pooled of the prompt, with the first output."""
    if sequence.pooled is None:
        return ()
    values, count = sequence.pooled.values, sequence.pooled.num_tokens
    is_mean = sequence.sampling.pooling == "mean"
    return tuple(value / count for value in values) if is_mean else values


def _take_scores(sequence: Sequence) -> tuple[SampledToken, ...]:
    """The log-probabilities of the prompt's tokens but the first, with the first output."""
    if not sequence.scores_prompt:
        return ()
    scores = sequence.prompt_logprobs
    sequence.prompt_logprobs = {}
    return tuple(scores[position] for position in range(1, sequence.num_prompt_tokens))
