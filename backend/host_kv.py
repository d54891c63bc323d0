"""KV blocks in host memory, and the copies between them and the device's."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch

from shoal.backend.kv_cache import PagedKVCache
from shoal.scheduler.transfers import BlockCopy

MOST_BLOCKS_AT_ONCE = 64  # of one copy: they pass through memory taken for the moment


class HostKV:
    """As many blocks of each KV group as the host pool has. The pool owns the numbering.

    Memory is taken as blocks are first written, and is page-locked beside a GPU.
    """

    def __init__(self, cache: PagedKVCache, num_blocks: Sequence[int]) -> None:
        self.cache = cache
        self._device_parts = [cache.block_parts(group) for group in range(len(num_blocks))]
        self._host_parts = [
            [_host_twin(part, count) for part in parts]
            for parts, count in zip(self._device_parts, num_blocks, strict=True)
        ]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out copies in their order."""
        for run in _independent_runs(copies):
            first = run[0]
            device, host = self._device_parts[first.group], self._host_parts[first.group]
            sources, targets = (host, device) if first.to_device else (device, host)
            host_ids = [copy.host_block for copy in run]
            device_ids = [copy.device_block for copy in run]
            source_ids, target_ids = (
                (host_ids, device_ids) if first.to_device else (device_ids, host_ids)
            )
            for source, target in zip(sources, targets, strict=True):
                _copy_blocks(source, source_ids, target, target_ids)

    def block_bytes(self, group: int) -> int:
        """Size of one block of all layers of a group."""
        return sum(part[:, 0].nbytes for part in self._host_parts[group])

    def read(self, host_block: int) -> bytearray:
        """The contents of a block of the first group."""
        contents = bytearray()
        for part in self._host_parts[0]:
            block = part[:, host_block].contiguous().view(torch.uint8)
            contents += memoryview(block.numpy().data).cast("B")
        return contents

    def write(self, host_block: int, contents: bytearray) -> None:
        """Set the contents of a block of the first group, as ``read`` gave them."""
        assert len(contents) == self.block_bytes(0)
        position = 0
        for part in self._host_parts[0]:
            block = part[:, host_block]
            values = torch.frombuffer(
                contents, dtype=part.dtype, count=block.numel(), offset=position
            )
            block.copy_(values.view(block.shape))
            position += block.nbytes


def _host_twin(part: torch.Tensor, num_blocks: int) -> torch.Tensor:
    shape = (part.shape[0], num_blocks, *part.shape[2:])
    return torch.empty(shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")


def _independent_runs(copies: Iterable[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Copies that can be made at once: of one direction and group, none into another's target."""
    for _, same in groupby(copies, lambda copy: (copy.to_device, copy.group)):
        run: list[BlockCopy] = []
        targets: set[int] = set()
        for copy in same:
            target = copy.device_block if copy.to_device else copy.host_block
            if target in targets or len(run) == MOST_BLOCKS_AT_ONCE:
                yield run
                run, targets = [], set()
            run.append(copy)
            targets.add(target)
        yield run


def _copy_blocks(
    source: torch.Tensor, source_ids: list[int], target: torch.Tensor, target_ids: list[int]
) -> None:
    """Blocks are dimension 1 of both. To and from a GPU each copy is waited for: a host block may
    be written by the CPU, or go to disk, right afterwards."""
    if source.device == target.device:
        blocks = source.index_select(1, torch.tensor(source_ids))
        target.index_copy_(1, torch.tensor(target_ids), blocks)
        return
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        target[:, target_id].copy_(source[:, source_id])
