"""The tier below the device: what is saved there, what comes back, and at what price."""

from collections.abc import Iterable, Sequence

from shoal.scheduler.host_pool import Checkpoint, HostPool
from shoal.scheduler.host_prefixes import DiskIndex, HostPrefix, HostPrefixes
from shoal.scheduler.prefix_nodes import EvictedRun
from shoal.scheduler.return_cost import ReturnCosts
from shoal.scheduler.transfers import BlockCopy, DiskResult, Transfer


class HostTier:
    """Keeps the books of host memory and orders the copies; the model runner carries them out.

    With ``keeps_prefixes`` blocks that the prefix tree gives up move here. That is for models of
    one KV group: of a windowed group the tree has only what lies beside its own blocks.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        block_size: int,
        costs: ReturnCosts,
        keeps_prefixes: bool = True,
        disk: DiskIndex | None = None,
    ) -> None:
        self.costs = costs
        self.pool = HostPool(num_blocks, block_size)
        self.num_checkpoints = 0  # in all
        self.num_restores = 0
        self._block_size = block_size
        self._transfers: list[Transfer] = []
        if keeps_prefixes and costs.demoting_pays(block_size):
            self.pool.prefixes = HostPrefixes(block_size, self.pool, self._transfers.append, disk)

    @property
    def prefixes(self) -> HostPrefixes | None:
        return self.pool.prefixes

    def order(self, transfers: Iterable[Transfer]) -> None:
        """Add orders of others, which are to be carried out in order with its own."""
        self._transfers += transfers

    def take_transfers(self) -> tuple[Transfer, ...]:
        """All orders since the last time, in the order in which they must be carried out."""
        transfers = tuple(self._transfers)
        self._transfers.clear()
        return transfers

    def demote(self, run: EvictedRun) -> None:
        """The prefix tree's hook: keep what it gives up."""
        if self.prefixes is not None:
            self.prefixes.demote(run)

    def save(self, seq_id: int, num_tokens: int, tables: Sequence[Sequence[int | None]]) -> None:
        """Checkpoint a sequence: copy the blocks of its tables, None where there is none."""
        held = [[block is not None for block in table] for table in tables]
        checkpoint = self.pool.save(seq_id, num_tokens, held)
        self._copy(tables, checkpoint, to_device=False)
        self.num_checkpoints += 1

    def restore(self, seq_id: int, tables: Sequence[Sequence[int | None]]) -> None:
        """Copy a checkpoint to the blocks of the sequence's new tables, and forget it."""
        checkpoint = self.pool.checkpoint(seq_id)
        assert checkpoint is not None
        self._copy(tables, checkpoint, to_device=True)
        self.pool.drop(seq_id)
        self.num_restores += 1

    def restore_prefix(self, found: Sequence[HostPrefix], blocks: Sequence[int]) -> None:
        """Copy prefix blocks to the device; here they stay as well."""
        assert self.prefixes is not None
        self.prefixes.touch(found)
        for entry, block in zip(found, blocks, strict=True):
            self._transfers.append(BlockCopy(True, 0, block, entry.host_block))

    def take_disk_results(self, results: Iterable[DiskResult]) -> list[bytes]:
        """What the disk has done; returns the digests of blocks to remove from it."""
        if self.prefixes is None:
            return []
        return [gone for result in results for gone in self.prefixes.take_result(result)]

    def forget(self, seq_id: int) -> None:
        """The sequence is finished."""
        self.pool.drop(seq_id)
        if self.prefixes is not None:
            self.prefixes.forget_sequence(seq_id)

    def _copy(
        self, tables: Sequence[Sequence[int | None]], checkpoint: Checkpoint, to_device: bool
    ) -> None:
        for group, (table, host_table) in enumerate(zip(tables, checkpoint.tables, strict=True)):
            for block, host_block in zip(table, host_table, strict=True):
                assert (block is None) == (host_block is None)
                if block is not None and host_block is not None:
                    self._transfers.append(BlockCopy(to_device, group, block, host_block))
