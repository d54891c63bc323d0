"""Whole texts from a tiny real model, through scheduler, runner and paged cache."""

from dataclasses import dataclass

import torch
from builders import make_scheduler
from paged_runs import fill_cache

from shoal.backend.host_kv import HostKV
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_disk import KVDisk
from shoal.backend.kv_layout import KVLayout
from shoal.backend.kv_mover import KVMover
from shoal.backend.model_runner import ModelRunner
from shoal.backend.pressure_guard import PressureGuard
from shoal.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
BLOCK_SIZE = 4


@dataclass
class Texts:
    """What came out, by seq_id, and the scheduler that it came from."""

    texts: dict[int, list[int]]
    failed: dict[int, str]
    scheduler: Scheduler


def make_kv_cache(
    layout: KVLayout,
    scheduler: Scheduler,
    fill: float = 0.0,
    stored: torch.dtype = torch.float32,
) -> PagedKVCache:
    """Memory for the scheduler's pools, and block 0 of windowed groups."""
    pools = [scheduler.kv.pool, *(window.pool for window in scheduler.kv.windows)]
    num_blocks = [pool.block_ids.stop for pool in pools]
    kv = PagedKVCache(layout, num_blocks, BLOCK_SIZE, stored)
    fill_cache(kv, fill)
    return kv


def make_mover(scheduler: Scheduler, kv: PagedKVCache, disk: KVDisk | None = None) -> KVMover:
    """Memory for the scheduler's host pool."""
    assert scheduler.kv.host is not None
    return KVMover(HostKV(kv, [scheduler.kv.host.pool.num_total] * len(kv.num_blocks)), disk)


def generate(
    loaded,
    sequences,
    *,
    model=None,
    guard=None,
    forks_of=None,
    disk=None,
    rounds=(),
    stored=torch.float32,
    **scheduler_options,
) -> Texts:
    """Run to the end; each of the ``rounds`` of more sequences when those before have ended.

    ``model`` stands in for the loaded one; ``forks_of`` is the seq_id of the sequence from which
    all others fork. The memory's first contents are NaN.
    """
    scheduler = make_scheduler(block_size=BLOCK_SIZE, **scheduler_options)
    kv = make_kv_cache(loaded.config.kv_layout, scheduler, float("nan"), stored)
    mover = make_mover(scheduler, kv, disk) if scheduler.kv.host else None
    runner = ModelRunner(model or loaded.model, kv, CPU, guard, mover)
    failed: dict[int, str] = {}
    for batch in (sequences, *rounds):
        for sequence in batch:
            if forks_of in (None, sequence.seq_id):
                scheduler.add(sequence)
            else:
                scheduler.fork(forks_of, sequence)
        failed |= run_to_end(scheduler, runner, guard, mover)
    everyone = [*sequences, *(sequence for batch in rounds for sequence in batch)]
    texts = {s.seq_id: s.token_ids[s.num_prompt_tokens :] for s in everyone}
    return Texts(texts, failed, scheduler)


def run_to_end(
    scheduler: Scheduler,
    runner: ModelRunner,
    guard: PressureGuard | None = None,
    mover: KVMover | None = None,
) -> dict[int, str]:
    """Step as the engine does; what failed."""
    failed: dict[int, str] = {}
    while scheduler.has_unfinished:
        if guard is not None:
            scheduler.limits = guard.before_step()
        if mover is not None:
            wait_s = 1.0 if scheduler.is_loading else 0.0
            mover.remove(scheduler.take_disk_results(mover.take_results(wait_s)))
        output = scheduler.schedule()
        result = runner.run(output)
        failed |= result.failed
        scheduler.update_from_output(output, result.sampled, result.failed, result.deferred)
        scheduler.check_integrity()
    return failed
