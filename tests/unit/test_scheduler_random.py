"""Random workloads: integrity after every step, the right tokens, progress, nothing left over."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from builders import FakeKVContents, Step, fake_token, make_scheduler, make_sequence, run_step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.scheduler.eviction import EvictionPolicy, LfuPolicy, LruPolicy, ReusePolicy
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import FinishReason, Sequence
from shoal.scheduler.transfers import DeviceCopy
from shoal.scheduler.window_blocks import HOLE, most_window_blocks


@dataclass
class Ledger:
    """What was asked and what came out; checks each output against it."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    num_outputs: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    ended: set[int] = field(default_factory=set)

    def take(self, step: Step) -> None:
        for result in step.results:
            seq_id = result.seq_id
            assert seq_id not in self.ended, "an output after the end"
            assert result.output_index == self.num_outputs[seq_id], "lost or doubled"
            if result.finish_reason is not FinishReason.ERROR:
                assert result.token == fake_token(seq_id, result.output_index)
                self.num_outputs[seq_id] += 1
            if result.finish_reason is FinishReason.LENGTH:
                assert self.num_outputs[seq_id] == self.sequences[seq_id].sampling.max_tokens
            if result.finish_reason:
                self.ended.add(seq_id)


def check_step(scheduler: Scheduler, step: Step, was_live: bool) -> None:
    scheduled = step.output.scheduled
    assert step.output.num_tokens <= scheduler.config.max_num_batched_tokens
    assert len(scheduled) <= scheduler.config.max_num_seqs
    assert bool(scheduled) == was_live or scheduler.is_loading, "a step without progress"
    assert all(item.num_tokens > 0 for item in scheduled)
    assert not {item.sequence.seq_id for item in scheduled} & set(step.output.preempted)


def small_reuse() -> ReusePolicy:
    return ReusePolicy(max_ghost_blocks=50)


EVICTIONS = {"none": lambda: None, "lru": LruPolicy, "lfu": LfuPolicy, "reuse": small_reuse}

KV_OPTIONS: list[dict[str, Any]] = [
    {},
    {},
    {"kv_policy": "attention_sink", "kv_budget": 64},
    {"kv_policy": "h2o", "kv_budget": 70},
]


def draw_limits(rng: random.Random) -> dict[str, Any]:
    """Limits, and up to two windowed groups, with pools for any use or just for one sequence."""
    num_blocks = rng.choice([6, 20, 60])
    block_size = rng.choice([1, 4, 16])
    budget = rng.choice([16, 64, 512])
    windows = []
    for _ in range(rng.choice([0, 1, 2])):
        window = rng.randint(1, 3 * block_size)
        fewest = most_window_blocks(window, block_size, 1, budget)
        windows.append((window, rng.choice([num_blocks, min(fewest, num_blocks)])))
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": rng.choice([1, 4, 16]),
        "max_num_batched_tokens": budget,
        "windows": windows,
        "host_blocks": rng.choice([0, 3, num_blocks // 2, 4 * num_blocks]),
        "return_costs": (rng.choice([1e-5, 2e-3]), 1e-3),  # of a block copied, a token computed
        "disk_blocks": rng.choice([0, 10, 100]),
    }


class Workload:
    """Random operations on one scheduler; all that it keeps is checked after each of them."""

    MOST_LIVE = 30

    def __init__(self, rng: random.Random, eviction: EvictionPolicy | None) -> None:
        self.rng = rng
        self.scheduler = make_scheduler(prefix_eviction=eviction, **draw_limits(rng))
        self.contents = FakeKVContents()
        self.ledger = Ledger()
        self.done: Counter[str] = Counter()
        self._weights = {
            self.step: 50,
            self.add: 17,
            self.fork: 10,
            self.abort: 6,
            self.preempt: 5,
            self.evict: 5,
            self.hear_from_disk: 7,
        }

    def run(self, num_operations: int) -> None:
        """Do so many, then step until all is done."""
        operations, weights = list(self._weights), list(self._weights.values())
        for operation in self.rng.choices(operations, weights, k=num_operations):
            if len(self.ledger.sequences) - len(self.ledger.ended) >= self.MOST_LIVE:
                operation = self.step
            operation()
            self.done[operation.__name__] += 1
            self.check()
        while self.scheduler.has_unfinished:
            self.hear_from_disk()
            self.step()
        self.check_the_end()

    def step(self) -> None:
        was_live = self.scheduler.has_unfinished
        failed = {self._any_id(): "broken"} if self.rng.random() < 0.05 else {}
        step = run_step(self.scheduler, failed=failed, contents=self.contents)
        check_step(self.scheduler, step, was_live)
        self.ledger.take(step)
        self.done["restored"] += len(step.output.restored)
        self.done["copied"] += sum(isinstance(t, DeviceCopy) for t in step.output.transfers)

    def add(self) -> None:
        sequence = self._new_sequence()
        self.scheduler.add(sequence)
        self.ledger.sequences[sequence.seq_id] = sequence

    def fork(self) -> None:
        """Let a sequence begin like one of the last, which may be gone."""
        if not self.ledger.sequences:
            return
        child = self._new_sequence(lossy=False)
        parent = self.ledger.sequences[
            max(0, len(self.ledger.sequences) - self.rng.randint(1, self.rng.choice([1, 4])))
        ]
        num_shared = self.rng.choice([parent.num_prompt_tokens, parent.num_tokens])
        num_shared = min(num_shared, child.num_tokens)
        child.token_ids[:num_shared] = parent.token_ids[:num_shared]
        child.cache_salt = parent.cache_salt
        self.scheduler.fork(parent.seq_id, child)
        self.ledger.sequences[child.seq_id] = child

    def abort(self) -> None:
        seq_id = self._any_id()
        if self.scheduler.abort(seq_id):
            self.ledger.ended.add(seq_id)

    def preempt(self) -> None:
        """Take any running sequence's blocks, as for want of them."""
        if self.scheduler._running:
            self.scheduler._preempt(self.rng.choice(self.scheduler._running))
            self.done["forced"] += 1

    def evict(self) -> None:
        """Take cached blocks, as for want of them."""
        kv, wanted = self.scheduler.kv, self.rng.randint(1, 10)
        if kv.prefix_tree is not None:
            self.done["evicted"] += min(wanted, kv.prefix_tree.num_evictable)
            kv._evict(wanted)
        for window in kv.windows:
            window.make_room(min(window.pool.num_blocks, window.pool.num_free + wanted))

    def hear_from_disk(self) -> None:
        results = self.contents.take_disk_results(self.rng.randint(1, 3))
        self.scheduler.take_disk_results(results)

    def check(self) -> None:
        """Free, cached and used blocks are all that there are, in each pool, and more."""
        self.scheduler.check_integrity()
        kv, running = self.scheduler.kv, self.scheduler._running
        cached = set(kv.prefix_tree.block_ids()) if kv.prefix_tree else set()
        used = {block_id for sequence in running for block_id in sequence.block_table} - cached
        assert kv.pool.num_free + len(cached) + len(used) == kv.pool.num_blocks
        for window in kv.windows:
            tables = [window.table(sequence) for sequence in running]
            held = {block_id for table in tables for block_id in table if block_id != HOLE}
            num_used = len(held | window.cached_blocks)
            assert window.pool.num_free + num_used == window.pool.num_blocks

    def check_the_end(self) -> None:
        scheduler, ledger = self.scheduler, self.ledger
        assert ledger.ended == set(ledger.sequences)
        num_sampled = sum(ledger.num_outputs.values())
        churn = scheduler.num_preemptions - self.done["forced"]
        assert churn <= len(ledger.sequences) + num_sampled // scheduler.kv.block_size
        assert all(sequence.is_finished for sequence in ledger.sequences.values())
        assert scheduler.free_blocks == scheduler.kv.pool.num_blocks
        for window in scheduler.kv.windows:
            assert window.pool.num_free + window.num_cached == window.pool.num_blocks
        self.done["preempted"] += churn

    def _any_id(self) -> int:
        return self.rng.randrange(len(self.ledger.sequences) + 1)

    def _new_sequence(self, lossy: bool = True) -> Sequence:
        rng, longest = self.rng, self.scheduler.config.max_model_len
        num_prompt = rng.randint(1, max(1, longest // rng.choice([2, 8, 50])))
        return make_sequence(
            len(self.ledger.sequences),
            num_prompt,
            prompt_seed=rng.randint(0, 3),
            cache_salt=rng.choice([b"", b"a"]),
            max_tokens=rng.randint(1, min(60, longest - num_prompt)),
            **(rng.choice(KV_OPTIONS) if lossy else {}),
        )


NUM_OPERATIONS = 20_000
NUM_SEEDS = 12


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_random_workload(eviction: str) -> None:
    done: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        workload = Workload(random.Random(seed), EVICTIONS[eviction]())
        try:
            workload.run(-(-NUM_OPERATIONS // (NUM_SEEDS * len(EVICTIONS))))
        except AssertionError as error:
            error.add_note(f"seed {seed}, eviction {eviction}")
            raise
        done += workload.done
    rare = {"copied": 20, "restored": 5, "preempted": 20, "forced": 50}
    rare |= {"abort": 150, "fork": 200, "add": 400, "step": 2000}
    if eviction != "none":
        rare["evicted"] = 50
    assert {name: count for name, count in rare.items() if done[name] < count} == {}, done


class SchedulerMachine(RuleBasedStateMachine):
    """A tiny pool and budget, so that hypothesis reaches every corner in few moves."""

    eviction = "none"
    windows: tuple[tuple[int, int], ...] = ()
    host_blocks = 0
    disk_blocks = 0

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            num_blocks=5,
            block_size=2,
            max_num_seqs=3,
            max_num_batched_tokens=4,
            prefix_eviction=EVICTIONS[self.eviction](),
            windows=self.windows,
            host_blocks=self.host_blocks,
            disk_blocks=self.disk_blocks,
        )
        self.contents = FakeKVContents()
        self.ledger = Ledger()

    @rule(num_prompt=st.integers(1, 9), max_tokens=st.integers(1, 9), num_outputs=st.integers(0, 3))
    def add(self, num_prompt: int, max_tokens: int, num_outputs: int) -> None:
        num_outputs = min(num_outputs, max_tokens - 1, 9 - num_prompt)
        max_tokens = min(max_tokens, 10 - num_prompt)
        seq_id = len(self.ledger.sequences)
        sequence = make_sequence(
            seq_id,
            num_prompt,
            num_output_tokens=num_outputs,
            prompt_seed=seq_id % 2,
            max_tokens=max_tokens,
        )
        self.ledger.sequences[seq_id] = sequence
        self.ledger.num_outputs[seq_id] = num_outputs
        self.scheduler.add(sequence)

    @precondition(lambda self: self.ledger.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(list(self.ledger.sequences)))
        assert self.scheduler.abort(seq_id) == (seq_id not in self.ledger.ended)
        self.ledger.ended.add(seq_id)

    @rule(fails=st.integers(0, 8))
    def step(self, fails: int) -> None:
        self.scheduler.take_disk_results(self.contents.take_disk_results(1))
        was_live = self.scheduler.has_unfinished
        failed = {fails: "broken"} if fails < 3 else {}
        step = run_step(self.scheduler, failed=failed, contents=self.contents)
        check_step(self.scheduler, step, was_live)
        self.ledger.take(step)

    @invariant()
    def holds_together(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        while self.scheduler.has_unfinished:
            self.step(fails=8)
        assert self.ledger.ended == set(self.ledger.sequences)
        assert self.scheduler.free_blocks == 5


class CachingSchedulerMachine(SchedulerMachine):
    eviction = "reuse"


class HybridSchedulerMachine(SchedulerMachine):
    eviction = "reuse"
    windows = ((3, 5), (5, 5))


class CheckpointingSchedulerMachine(SchedulerMachine):
    host_blocks = 4


class TieredSchedulerMachine(SchedulerMachine):
    eviction = "lru"
    host_blocks = 3
    disk_blocks = 4


_SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
SchedulerMachine.TestCase.settings = _SETTINGS
CachingSchedulerMachine.TestCase.settings = _SETTINGS
HybridSchedulerMachine.TestCase.settings = _SETTINGS
CheckpointingSchedulerMachine.TestCase.settings = _SETTINGS
TieredSchedulerMachine.TestCase.settings = _SETTINGS
TestSchedulerMachine = SchedulerMachine.TestCase
TestCachingSchedulerMachine = CachingSchedulerMachine.TestCase
TestHybridSchedulerMachine = HybridSchedulerMachine.TestCase
TestCheckpointingSchedulerMachine = CheckpointingSchedulerMachine.TestCase
TestTieredSchedulerMachine = TieredSchedulerMachine.TestCase
