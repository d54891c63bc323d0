"""Host memory for KV blocks: checkpoints of preempted sequences, and cached prefixes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.scheduler.block_pool import BlockPool
from shoal.scheduler.host_prefixes import HostPrefixes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The keys and values of a sequence's first ``num_tokens`` tokens, by KV group.

    A table has a host block for each block of the sequence's own table, None where the sequence
    had dropped one.
    """

    num_tokens: int
    tables: tuple[tuple[int | None, ...], ...]

    def host_blocks(self, group: int) -> list[int]:
        return [block for block in self.tables[group] if block is not None]


class HostPool:
    """Who has which host block. Cached prefixes give way to checkpoints, never the other way.

    Owned by the engine thread, as the device's pools are.
    """

    def __init__(self, num_blocks: Sequence[int], block_size: int) -> None:
        self._pools = [BlockPool(count, block_size) for count in num_blocks]
        self._checkpoints: dict[int, Checkpoint] = {}  # by seq_id
        self.prefixes: HostPrefixes | None = None

    @property
    def num_total(self) -> int:
        """Blocks of the first group, whose number limits."""
        return self._pools[0].num_blocks

    @property
    def num_used(self) -> int:
        return self.num_total - self._pools[0].num_free

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    def allocate_prefix_block(self) -> int | None:
        """A block of the first group for a cached prefix, if one is free."""
        blocks = self._pools[0].allocate(1)
        return None if blocks is None else blocks[0]

    def free_prefix_block(self, host_block: int) -> None:
        self._pools[0].free([host_block])

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Whether a checkpoint of so many blocks by group fits."""
        spare = self.prefixes.num_evictable if self.prefixes is not None else 0
        return all(
            count <= pool.num_free + (spare if group == 0 else 0)
            for group, (count, pool) in enumerate(zip(num_blocks, self._pools, strict=True))
        )

    def save(self, seq_id: int, num_tokens: int, tables: Sequence[Sequence[bool]]) -> Checkpoint:
        """Take blocks for a sequence; ``tables`` says which entries of its tables hold a block."""
        assert seq_id not in self._checkpoints
        host_tables = []
        for pool, table in zip(self._pools, tables, strict=True):
            count = sum(table)
            if pool is self._pools[0] and self.prefixes is not None and count > pool.num_free:
                self.prefixes.evict(count - pool.num_free)
            blocks = pool.allocate(count)
            assert blocks is not None, "a checkpoint without room"
            remaining = iter(blocks)
            host_tables.append(tuple(next(remaining) if held else None for held in table))
        checkpoint = Checkpoint(num_tokens, tuple(host_tables))
        self._checkpoints[seq_id] = checkpoint
        return checkpoint

    def checkpoint(self, seq_id: int) -> Checkpoint | None:
        return self._checkpoints.get(seq_id)

    def drop(self, seq_id: int) -> None:
        """Give back a checkpoint's blocks; none is fine."""
        checkpoint = self._checkpoints.pop(seq_id, None)
        if checkpoint is not None:
            for group, pool in enumerate(self._pools):
                pool.free(checkpoint.host_blocks(group))

    def check_integrity(self, live_seq_ids: Iterable[int]) -> None:
        """Assert that every block has one holder or none, and no checkpoint outlives its owner."""
        assert set(self._checkpoints) <= set(live_seq_ids), "a checkpoint outlived its sequence"
        for group, pool in enumerate(self._pools):
            pool.check_integrity()
            held = [b for c in self._checkpoints.values() for b in c.host_blocks(group)]
            if group == 0 and self.prefixes is not None:
                self.prefixes.check_integrity()
                held += self.prefixes.host_blocks()
            assert len(set(held)) == len(held), "a host block has two holders"
            assert len(held) == pool.num_blocks - pool.num_free, "a host block leaked"
            assert all(pool.ref_count(block) == 1 for block in held)
