"""Random workloads: integrity after every step, the right tokens, progress, nothing left over."""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from builders import FakeKVContents, Step, fake_token, make_scheduler, make_sequence, run_step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.scheduler.eviction import LfuPolicy, LruPolicy, ReusePolicy
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import FinishReason, Sequence
from shoal.scheduler.window_blocks import most_window_blocks


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


def fork(rng: random.Random, scheduler: Scheduler, ledger: Ledger, child: Sequence) -> None:
    """Let a sequence begin like one of the last, which may be gone, if there is room for that."""
    parent = ledger.sequences[max(0, len(ledger.sequences) - rng.randint(1, 4))]
    num_shared = min(rng.choice([parent.num_prompt_tokens, parent.num_tokens]), child.num_tokens)
    child.token_ids[:num_shared] = parent.token_ids[:num_shared]
    child.cache_salt = parent.cache_salt
    scheduler.fork(parent.seq_id, child)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("seed", range(12))
def test_random_workload(seed: int, eviction: str) -> None:
    rng = random.Random(seed)
    contents = FakeKVContents()
    scheduler = make_scheduler(prefix_eviction=EVICTIONS[eviction](), **draw_limits(rng))
    longest = scheduler.config.max_model_len
    ledger = Ledger()
    for _ in range(600):
        if rng.random() < 0.4:
            num_prompt = rng.randint(1, max(1, longest // rng.choice([2, 8, 50])))
            max_tokens = rng.randint(1, min(60, longest - num_prompt))
            sequence = make_sequence(
                len(ledger.sequences),
                num_prompt,
                prompt_seed=rng.randint(0, 3),
                cache_salt=rng.choice([b"", b"a"]),
                max_tokens=max_tokens,
                **rng.choice(KV_OPTIONS),
            )
            if ledger.sequences and rng.random() < 0.3:
                fork(rng, scheduler, ledger, sequence)
            else:
                scheduler.add(sequence)
            ledger.sequences[sequence.seq_id] = sequence
        if ledger.sequences and rng.random() < 0.1:
            seq_id = rng.choice(list(ledger.sequences))
            if scheduler.abort(seq_id):
                ledger.ended.add(seq_id)
        scheduler.take_disk_results(contents.take_disk_results(rng.randint(0, 3)))
        was_live = scheduler.has_unfinished
        fails = rng.random() < 0.05 and ledger.sequences
        failed = {rng.choice(list(ledger.sequences)): "broken"} if fails else {}
        step = run_step(scheduler, failed=failed, contents=contents)
        check_step(scheduler, step, was_live)
        ledger.take(step)
    while scheduler.has_unfinished:
        scheduler.take_disk_results(contents.take_disk_results(1))
        step = run_step(scheduler, contents=contents)
        check_step(scheduler, step, True)
        ledger.take(step)
    assert ledger.ended == set(ledger.sequences)
    num_sampled = sum(ledger.num_outputs.values())
    assert (
        scheduler.num_preemptions <= len(ledger.sequences) + num_sampled // scheduler.kv.block_size
    )
    assert all(sequence.is_finished for sequence in ledger.sequences.values())
    assert scheduler.free_blocks == scheduler.kv.pool.num_blocks


class SchedulerMachine(RuleBasedStateMachine):
    """A tiny pool and budget, so that hypothesis reaches every corner in few moves."""

    eviction = "none"
    windows: tuple[tuple[int, int], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            num_blocks=5,
            block_size=2,
            max_num_seqs=3,
            max_num_batched_tokens=4,
            prefix_eviction=EVICTIONS[self.eviction](),
            windows=self.windows,
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


_SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
SchedulerMachine.TestCase.settings = _SETTINGS
CachingSchedulerMachine.TestCase.settings = _SETTINGS
HybridSchedulerMachine.TestCase.settings = _SETTINGS
TestSchedulerMachine = SchedulerMachine.TestCase
TestCachingSchedulerMachine = CachingSchedulerMachine.TestCase
TestHybridSchedulerMachine = HybridSchedulerMachine.TestCase
