"""Builders of scheduler objects for tests, and a step without a model."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from shoal.scheduler.block_pool import BlockPool
from shoal.scheduler.eviction import EvictionPolicy
from shoal.scheduler.host_prefixes import DiskIndex
from shoal.scheduler.host_tier import HostTier
from shoal.scheduler.kv_manager import KVCacheManager
from shoal.scheduler.outputs import (
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    StepOutput,
)
from shoal.scheduler.prefix_tree import PrefixTree
from shoal.scheduler.return_cost import ReturnCosts
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.scheduler import Scheduler, SchedulerConfig
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.transfers import DeviceCopy, DiskLoad, DiskResult, DiskStore, Transfer
from shoal.scheduler.window_blocks import WindowBlocks

EOS = 2


def fake_token(seq_id: int, output_index: int) -> SampledToken:
    """The token that the pretended model gives: it depends on its arguments alone, never EOS."""
    return SampledToken(1000 + (seq_id * 7919 + output_index * 104729) % 5003)


def make_sampling(**sampling: Any) -> SamplingParams:
    """Sampling parameters with a seed and at most 8 tokens, unless told otherwise."""
    return SamplingParams(**{"max_tokens": 8, "seed": 0, **sampling})


def make_sequence(
    seq_id: int = 0,
    num_prompt_tokens: int = 16,
    *,
    num_output_tokens: int = 0,
    prompt_seed: int | None = None,
    cache_salt: bytes = b"",
    eos_token_ids: frozenset[int] = frozenset({EOS}),
    **sampling: Any,
) -> Sequence:
    """A sequence as it arrives; with outputs, as a replay does. Equal seeds, equal prompts."""
    seed = seq_id if prompt_seed is None else prompt_seed
    prompt = [10 + (seed + i) % 100 for i in range(num_prompt_tokens)]
    outputs = [fake_token(seq_id, i).token_id for i in range(num_output_tokens)]
    return Sequence(
        seq_id,
        prompt + outputs,
        num_prompt_tokens,
        make_sampling(**sampling),
        eos_token_ids,
        cache_salt,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512,
    max_model_len: int | None = None,
    prefix_eviction: EvictionPolicy | None = None,
    windows: SequenceOf[tuple[int, int]] = (),
    host_blocks: int = 0,
    return_costs: tuple[float, float] = (1e-4, 1e-3),
    disk_blocks: int = 0,
    disk_digests: SequenceOf[bytes] = (),
) -> Scheduler:
    """A scheduler over new pools; by default a sequence may fill the whole pool, and
    nothing is cached. ``windows``: window and number of blocks of further KV groups.
    ``return_costs``: of copying a block once, and of computing a token."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len or num_blocks * block_size,
    )
    host = None
    if host_blocks:
        num_groups = 1 + len(windows)
        copy_s = (return_costs[0],) * num_groups
        host = HostTier(
            [host_blocks] * num_groups,
            block_size,
            ReturnCosts(copy_s, copy_s, return_costs[1]),
            keeps_prefixes=prefix_eviction is not None and not windows,
            disk=DiskIndex(disk_blocks, disk_digests) if disk_blocks else None,
        )
    on_demote = host.demote if host else None
    tree = PrefixTree(block_size, prefix_eviction, on_demote=on_demote) if prefix_eviction else None
    window_blocks = [
        WindowBlocks(BlockPool(count, block_size, first_id=1), window, group)
        for group, (window, count) in enumerate(windows, start=1)
    ]
    return Scheduler(
        config, KVCacheManager(BlockPool(num_blocks, block_size), tree, window_blocks, host)
    )


@dataclass(frozen=True)
class Step:
    """One step: what was scheduled, and what came out."""

    output: SchedulerOutput
    num_tokens: dict[int, int]  # by seq_id
    results: list[StepOutput]

    @property
    def seq_ids_with_token(self) -> set[int]:
        return {result.seq_id for result in self.results if result.token is not None}


class FakeKVContents:
    """What a model would have left in each slot: the whole prefix that its KV depends on."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], tuple[bytes, int]] = {}  # by group and slot
        self._host: dict[tuple[int, int], list[tuple[bytes, int] | None]] = {}  # by group and block
        self._disk: dict[bytes, list[tuple[bytes, int] | None]] = {}
        self._disk_results: list[DiskResult] = []
        self.num_copied = 0
        self.num_loaded = 0

    def take_disk_results(self, count: int | None = None) -> list[DiskResult]:
        """What a disk would have done meanwhile; with ``count`` only the first so many."""
        results = self._disk_results[:count]
        del self._disk_results[:count]
        return results

    def move(self, transfers: SequenceOf[Transfer], block_size: int) -> None:
        """Carry out the scheduler's orders, with a disk that works at once and answers later."""
        for transfer in transfers:
            if isinstance(transfer, DeviceCopy):
                self._copy(transfer, block_size)
                continue
            if isinstance(transfer, DiskStore):
                self._disk[transfer.digest] = list(self._host[0, transfer.host_block])
                self._disk_results.append(DiskResult(transfer.digest, loaded=False, ok=True))
                continue
            if isinstance(transfer, DiskLoad):
                contents = self._disk.get(transfer.digest)
                if contents is not None:
                    self._host[0, transfer.host_block] = list(contents)
                    self.num_loaded += 1
                result = DiskResult(transfer.digest, loaded=True, ok=contents is not None)
                self._disk_results.append(result)
                continue
            self.num_copied += 1
            first = transfer.device_block * block_size
            slots = [(transfer.group, slot) for slot in range(first, first + block_size)]
            key = (transfer.group, transfer.host_block)
            if not transfer.to_device:
                self._host[key] = [self._slots.get(slot) for slot in slots]
                continue
            for slot, value in zip(slots, self._host[key], strict=True):
                if value is not None:
                    self._slots[slot] = value
                else:
                    self._slots.pop(slot, None)

    def run(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Check that each sequence finds its own prefix in its slots; write what it computes."""
        self.move(output.transfers, scheduler.kv.block_size)
        for item in output.scheduled:
            for group, table in enumerate(item.sequence.block_tables):
                windows = scheduler.kv.windows
                window = windows[group - 1].window if group else None
                if group == 0 and item.sequence.eviction is not None:
                    self._run_lossy(item, scheduler.kv.block_size)
                else:
                    self._run_group(item, group, table, window, scheduler.kv.block_size)

    def _run_lossy(self, item: ScheduledSequence, block_size: int) -> None:
        sequence = item.sequence
        prefix = hash(sequence.cache_salt)
        contents = []
        for token_id in sequence.token_ids[: sequence.num_computed_tokens + item.num_tokens]:
            prefix = hash((prefix, token_id))
            contents.append((sequence.cache_salt, prefix))
        slots = _slots(sequence, item.num_tokens, block_size)
        new = zip(slots[-item.num_tokens :], contents[-item.num_tokens :], strict=True)
        found = [self._slots.get(slot) for slot in slots[: -item.num_tokens]]
        _check_what_is_left(found, contents, sequence, block_size)
        self._slots.update(new)

    def _copy(self, copy: DeviceCopy, block_size: int) -> None:
        assert copy.group == 0 or copy.source > 0 < copy.target, "a hole is copied"
        for offset in range(block_size):
            found = self._slots.get((copy.group, copy.source * block_size + offset))
            if found is not None:
                self._slots[copy.group, copy.target * block_size + offset] = found

    def _run_group(
        self,
        item: ScheduledSequence,
        group: int,
        table: list[int],
        window: int | None,
        block_size: int,
    ) -> None:
        sequence = item.sequence
        prefix = hash(sequence.cache_salt)
        num_computed = sequence.num_computed_tokens
        first_seen = 0 if window is None else num_computed - window + 1
        for position, token_id in enumerate(sequence.token_ids[: num_computed + item.num_tokens]):
            prefix = hash((prefix, token_id))
            if position < first_seen:
                continue
            slot = (group, table[position // block_size] * block_size + position % block_size)
            if position >= num_computed and not item.only_lacks_logits:
                assert group == 0 or slot[1] >= block_size, "a hole was written to"
                self._slots[slot] = (sequence.cache_salt, prefix)
                continue
            found = self._slots.get(slot)
            assert found == (sequence.cache_salt, prefix), (
                f"sequence {sequence.seq_id} reads a wrong slot at position {position}"
            )


def _slots(sequence: Sequence, num_new_tokens: int, block_size: int) -> list[tuple[int, int]]:
    """Of all tokens that the sequence holds and of its next, in order."""
    return [
        (0, sequence.block_table[index // block_size] * block_size + index % block_size)
        for index in range(sequence.num_held_tokens + num_new_tokens)
    ]


def _check_what_is_left(
    found: list[Any], contents: list[Any], sequence: Sequence, block_size: int
) -> None:
    """Whole blocks of the sequence's own past in order, the first and the last among them."""
    eviction = sequence.eviction
    assert eviction is not None
    assert len(sequence.block_table) <= eviction.num_blocks
    position_of = {content: position for position, content in enumerate(contents)}
    positions = [position_of[content] for content in found]
    assert positions == sorted(set(positions))
    assert sequence.num_evicted_tokens % block_size == 0
    assert all(p % block_size == index % block_size for index, p in enumerate(positions))
    if positions:
        assert positions[:4] == list(range(len(positions[:4])))
        assert positions[-1] == sequence.num_computed_tokens - 1


def run_step(
    scheduler: Scheduler,
    *,
    tokens: Mapping[int, int] | None = None,
    failed: Mapping[int, str] | None = None,
    contents: "FakeKVContents | None" = None,
) -> Step:
    """Schedule, pretend to run, update. ``tokens`` replaces the fake token of some seq_ids."""
    output = scheduler.schedule()
    if contents is not None:
        contents.run(scheduler, output)
    num_tokens = {item.sequence.seq_id: item.num_tokens for item in output.scheduled}
    sampled = {
        item.sequence.seq_id: fake_token(item.sequence.seq_id, item.sequence.num_output_tokens)
        for item in output.scheduled
        if item.samples
    }
    sampled |= {seq_id: SampledToken(token_id) for seq_id, token_id in (tokens or {}).items()}
    results = scheduler.update_from_output(output, sampled, failed or {})
    scheduler.check_integrity()
    return Step(output, num_tokens, results)


def run_until_token(scheduler: Scheduler, seq_id: int, max_steps: int = 1000) -> int:
    """Step until the sequence gives a token; the number of steps that took."""
    for num_steps in range(1, max_steps + 1):
        if seq_id in run_step(scheduler).seq_ids_with_token:
            return num_steps
    raise AssertionError(f"sequence {seq_id} gave no token in {max_steps} steps")
