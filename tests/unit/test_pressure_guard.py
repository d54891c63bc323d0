"""Steps get smaller as memory gets short, and a failed allocation costs nobody their text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from builders import make_scheduler, make_sequence, run_step
from tiny_checkpoint import write_tiny_checkpoint
from tiny_runs import generate

from shoal.backend.engine_config import ConfigError
from shoal.backend.memory_watch import MIB, HostMemoryWatch, MemoryReading
from shoal.backend.model_runner import OUT_OF_MEMORY
from shoal.backend.pressure_guard import Pressure, PressureGuard, is_out_of_memory
from shoal.backend.weights.loader import load_model
from shoal.scheduler.step_limits import StepLimits

GIB = 1024 * MIB


class FakeMemory:
    def __init__(self, ceiling=8 * GIB):
        self.ceiling = ceiling
        self.headroom = ceiling
        self.num_releases = 0
        self.num_reads = 0

    def read(self):
        self.num_reads += 1
        return MemoryReading(self.ceiling, self.headroom)

    def release(self):
        self.num_releases += 1


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def memory():
    return FakeMemory()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def guard(memory, clock):
    return PressureGuard(memory, 512, clock)


def look(guard, clock, times=1):
    for _ in range(times):
        clock.now += 0.11
        limits = guard.before_step()
    return limits


def test_with_room_nothing_is_held_back(guard, clock):
    assert look(guard, clock, 100) == StepLimits(512)
    assert guard.pressure is Pressure.CALM


def test_memory_is_read_every_100_ms_and_not_every_step(guard, clock, memory):
    look(guard, clock)
    memory.headroom = 0
    assert guard.before_step() == StepLimits(512)
    assert look(guard, clock).max_num_tokens == 256


def test_an_idle_worker_looks_so_that_its_next_step_need_not(guard, clock, memory):
    look(guard, clock)
    num_reads = memory.num_reads
    for _ in range(20):
        clock.now += 0.05
        guard.while_idle()
    assert 8 <= memory.num_reads - num_reads <= 11  # every 100 ms
    num_reads = memory.num_reads
    clock.now += 0.05  # a step comes, at the latest after one more turn
    guard.before_step()
    assert memory.num_reads == num_reads
    clock.now += 0.12
    guard.before_step()
    assert memory.num_reads == num_reads + 1


def test_high_pressure_halves_steps_to_a_sixteenth_and_admits(guard, clock, memory):
    memory.headroom = memory.ceiling * 0.04
    assert look(guard, clock) == StepLimits(256)
    assert look(guard, clock, 20) == StepLimits(32)
    assert guard.pressure is Pressure.HIGH


def test_critical_pressure_goes_to_one_token_admits_nothing_and_frees(guard, clock, memory):
    memory.headroom = memory.ceiling * 0.01
    assert look(guard, clock, 20) == StepLimits(1, admits=False)
    assert guard.pressure is Pressure.CRITICAL
    assert memory.num_releases == 20


def test_a_large_machine_is_not_short_with_gigabytes_left(clock):
    memory = FakeMemory(512 * GIB)
    memory.headroom = 4 * GIB
    guard = PressureGuard(memory, 512, clock)
    assert look(guard, clock) == StepLimits(512)


def test_it_recovers_by_doubling_each_second_and_does_not_flutter(guard, clock, memory):
    memory.headroom = memory.ceiling * 0.04
    look(guard, clock, 3)
    memory.headroom = memory.ceiling * 0.06  # above the mark, within its margin
    look(guard, clock)
    assert guard.pressure is Pressure.HIGH
    memory.headroom = memory.ceiling
    budgets = []
    for _ in range(6):
        clock.now += 1.01
        budgets.append(guard.before_step().max_num_tokens)
    assert budgets == [64, 128, 256, 512, 512, 512]


def test_after_a_failed_allocation_steps_are_half_of_what_did_not_fit(guard, clock, memory):
    guard.allocation_failed(300)
    assert look(guard, clock).max_num_tokens == 150
    guard.allocation_failed(1)
    assert look(guard, clock).max_num_tokens == 1
    assert memory.num_releases == guard.num_failed_allocations == 2
    clock.now += 3.0  # two failures in a row: it waits longer than a second
    assert look(guard, clock).max_num_tokens == 1
    clock.now += 2.0
    assert look(guard, clock).max_num_tokens == 2


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_which_errors_are_failed_allocations(error, is_one):
    assert is_out_of_memory(error) == is_one


def test_torchs_own_failure_is_recognised():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)


def test_the_host_watch_sees_this_process_grow():
    watch = HostMemoryWatch()
    before = watch.read()
    ballast = torch.ones(64 * MIB, dtype=torch.uint8)
    after = watch.read()
    assert after.ceiling == before.ceiling
    assert after.headroom <= before.headroom - 32 * MIB
    del ballast
    watch.release()


def test_a_ceiling_below_the_loaded_worker_says_what_to_set():
    with pytest.raises(ConfigError, match="memory_ceiling_mib 64: .* set it to at least"):
        HostMemoryWatch(64 * MIB)


def test_a_ceiling_without_room_for_the_host_tier_is_refused():
    roomy = psutil.Process().memory_info().rss + 256 * MIB
    HostMemoryWatch(roomy)
    HostMemoryWatch(roomy, host_kv_bytes=64 * MIB)
    with pytest.raises(ConfigError, match="host_kv_mib 512 more: set it to at least"):
        HostMemoryWatch(roomy, host_kv_bytes=512 * MIB)


def test_sequences_take_turns_when_fewer_tokens_than_sequences_may_run():
    scheduler = make_scheduler()
    for seq_id in range(5):
        scheduler.add(make_sequence(seq_id, 4, max_tokens=30))
    run_step(scheduler)
    scheduler.limits = StepLimits(2)
    steps = [run_step(scheduler).num_tokens for _ in range(10)]
    assert all(sum(step.values()) == 2 for step in steps)
    counts = [sum(seq_id in step for step in steps) for seq_id in range(5)]
    assert counts == [4] * 5


def test_nothing_new_starts_under_critical_pressure_unless_nothing_runs():
    scheduler = make_scheduler()
    scheduler.limits = StepLimits(1, admits=False)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, 4, max_tokens=3))
    run_step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    for _ in range(30):
        run_step(scheduler)
        assert scheduler.num_running <= 1
    assert not scheduler.has_unfinished


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, torch.float32)


class ShortOfMemory:
    """A real model for which steps of more than ``most`` tokens do not fit, nor some sequence."""

    def __init__(self, model, most, never=None):
        self._model = model
        self.most = most
        self.never = never
        self.num_failures = 0

    def forward(self, batch, kv):
        too_large = len(batch.input_ids) > self.most
        if too_large or self.never in batch.input_ids.tolist():
            self.num_failures += 1
            raise torch.OutOfMemoryError("injected")
        return self._model.forward(batch, kv)


def make_sequences():
    return [make_sequence(i, 5 + 9 * i, max_tokens=12, temperature=1.0) for i in range(5)]


@pytest.mark.parametrize("most", [1, 3, 10])
def test_every_text_is_as_undisturbed_when_large_steps_fail(tiny_model, memory, most):
    undisturbed = generate(tiny_model, make_sequences())
    short = ShortOfMemory(tiny_model.model, most)
    guard = PressureGuard(memory, 512)
    disturbed = generate(tiny_model, make_sequences(), model=short, guard=guard)
    assert disturbed.texts == undisturbed.texts
    assert not disturbed.failed
    assert guard.num_failed_allocations == short.num_failures > 0
    assert memory.num_releases == short.num_failures


def test_only_the_sequence_that_never_fits_fails(tiny_model, memory):
    undisturbed = generate(tiny_model, make_sequences())
    sequences = make_sequences()
    sequences[2].token_ids[-1] = culprit = 120
    short = ShortOfMemory(tiny_model.model, 1000, never=culprit)
    result = generate(tiny_model, sequences, model=short, guard=PressureGuard(memory, 512))
    assert result.failed == {2: OUT_OF_MEMORY}
    others = {0, 1, 3, 4}
    assert {i: result.texts[i] for i in others} == {i: undisturbed.texts[i] for i in others}


def test_real_failures_of_the_allocator_under_an_address_space_limit(tmp_path):
    """The limit leaves room for small steps only, and torch's own allocator fails the others."""
    write_tiny_checkpoint(tmp_path / "tiny", intermediate_size=2**15, max_position_embeddings=4096)
    tests = Path(__file__).parents[1]
    command = [sys.executable, str(tests / "run_short_of_memory.py"), str(tmp_path / "tiny")]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["num_failed_allocations"] > 0
    assert report["failed"] == {}
    assert report["disturbed"] == report["undisturbed"]
