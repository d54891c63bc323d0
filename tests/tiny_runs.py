"""Whole texts from a tiny real model, through scheduler, runner and paged cache."""

from dataclasses import dataclass

import torch
from builders import make_scheduler

from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_layout import KVLayout
from shoal.backend.model_runner import ModelRunner
from shoal.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
BLOCK_SIZE = 4


@dataclass
class Texts:
    """What came out, by seq_id, and the scheduler that it came from."""

    texts: dict[int, list[int]]
    failed: dict[int, str]
    scheduler: Scheduler


def make_kv_cache(layout: KVLayout, scheduler: Scheduler, fill: float = 0.0) -> PagedKVCache:
    """Memory for the scheduler's pools, and block 0 of windowed groups."""
    pools = [scheduler.kv.pool, *(window.pool for window in scheduler.kv.windows)]
    num_blocks = [pool.block_ids.stop for pool in pools]
    kv = PagedKVCache(layout, num_blocks, BLOCK_SIZE, torch.float32)
    for layer_idx in range(kv.num_layers):
        kv.keys(layer_idx).fill_(fill)
        kv.values(layer_idx).fill_(fill)
    return kv


def generate(
    loaded, sequences, *, model=None, guard=None, forks_of=None, **scheduler_options
) -> Texts:
    """Run to the end. ``model`` stands in for the loaded one; ``forks_of`` is the seq_id of the
    sequence from which all others fork."""
    scheduler = make_scheduler(block_size=BLOCK_SIZE, **scheduler_options)
    kv = make_kv_cache(loaded.config.kv_layout, scheduler)
    runner = ModelRunner(model or loaded.model, kv, CPU, guard)
    failed: dict[int, str] = {}
    for sequence in sequences:
        if forks_of in (None, sequence.seq_id):
            scheduler.add(sequence)
        else:
            scheduler.fork(forks_of, sequence)
    while scheduler.has_unfinished:
        if guard is not None:
            scheduler.limits = guard.before_step()
        output = scheduler.schedule()
        result = runner.run(output)
        failed |= result.failed
        scheduler.update_from_output(output, result.sampled, result.failed, result.deferred)
        scheduler.check_integrity()
    texts = {s.seq_id: s.token_ids[s.num_prompt_tokens :] for s in sequences}
    return Texts(texts, failed, scheduler)
