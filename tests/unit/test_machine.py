import os

import psutil
import pytest
import torch

from shoal.backend import machine


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    return tmp_path


def free_memory():
    return machine.available_memory(torch.device("cpu"))


def test_without_a_container_everything_counts(cgroup):
    assert machine.num_usable_cpus() == len(os.sched_getaffinity(0))
    assert 0 < free_memory() <= psutil.virtual_memory().total


def test_a_containers_limits_count(cgroup):
    (cgroup / "cpu.max").write_text("50000 100000\n")
    (cgroup / "memory.max").write_text("3000000\n")
    (cgroup / "memory.current").write_text("2000000\n")
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert machine.num_usable_cpus() == 1
    assert free_memory() == 1_400_000


def test_a_container_without_limits_has_none(cgroup):
    (cgroup / "cpu.max").write_text("max 100000\n")
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("2000000\n")
    assert machine.num_usable_cpus() == len(os.sched_getaffinity(0))
    assert free_memory() > 2_000_000


def test_what_is_freed_between_what_stays_goes_back_to_the_system():
    process = psutil.Process()
    pieces = [bytearray(64 * 1024) for _ in range(2000)]  # 131 MB in the allocator's heap
    kept = pieces[::100]
    del pieces
    before = process.memory_info().rss
    machine.return_freed_memory()
    assert before - process.memory_info().rss > 60_000_000
    assert len(kept) == 20
