"""Measures, when the engine starts, what copies and prefill cost on this machine."""

import time
from collections.abc import Callable
from functools import partial

import torch

from shoal.backend.host_kv import HostKV
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.model_runner import ModelRunner
from shoal.scheduler.outputs import ScheduledSequence, SchedulerOutput
from shoal.scheduler.return_cost import ReturnCosts
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.step_pace import StepPace
from shoal.scheduler.transfers import BlockCopy

PREFILL_TOKENS = 64
COPY_BLOCKS = 8
NUM_REPEATS = 3  # the best counts: what else the machine did meanwhile is not the model's cost

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


def measure_return_costs(
    runner: ModelRunner, cache: PagedKVCache, host: HostKV, host_blocks: tuple[int, ...]
) -> ReturnCosts:
    """Run a few copies and chunks over blocks that nobody holds yet."""
    saves: list[float] = []
    restores: list[float] = []
    for group, num_host in enumerate(host_blocks):
        count = min(COPY_BLOCKS, num_host, cache.num_blocks[group])
        for to_device, seconds in ((False, saves), (True, restores)):
            copies = [BlockCopy(to_device, group, block, block) for block in range(count)]
            seconds.append(_best(partial(host.copy, copies), cache.device) / count)
    return ReturnCosts(tuple(saves), tuple(restores), _prefill_seconds(runner, cache))


def _prefill_seconds(runner: ModelRunner, cache: PagedKVCache) -> float:
    """Of one token of a chunk."""
    num_blocks = min(cache.num_blocks) - 1  # block 0 of a windowed group is nobody's
    num_tokens = min(PREFILL_TOKENS, num_blocks * cache.block_size)
    tables = [list(range(1, num_blocks + 1)) for _ in cache.num_blocks]
    sequence = Sequence(0, [0] * num_tokens, num_tokens, _GREEDY, block_tables=tables)
    output = SchedulerOutput((ScheduledSequence(sequence, num_tokens),))
    return _best(partial(runner.run, output), cache.device) / num_tokens


def measure_pace(runner: ModelRunner, cache: PagedKVCache, most_tokens: int) -> StepPace:
    """Run steps of several shapes over a block that nobody holds yet."""

    def scheduled(seq_id: int, num_tokens: int, num_computed: int) -> ScheduledSequence:
        length = num_computed + num_tokens
        tables = [[1] * -(-length // cache.block_size) for _ in cache.num_blocks]
        sequence = Sequence(seq_id, [0] * length, length, _GREEDY, block_tables=tables)
        sequence.num_computed_tokens = num_computed
        return ScheduledSequence(sequence, num_tokens)

    def run(num_decodes: int, num_prompt_tokens: int, num_computed: int) -> float:
        items = [scheduled(i, 1, 0) for i in range(num_decodes)]
        if num_prompt_tokens:
            items.append(scheduled(num_decodes, num_prompt_tokens, num_computed))
        return _best(partial(runner.run, SchedulerOutput(tuple(items))), cache.device)

    return StepPace.measured(run, most_tokens)


def _best(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
