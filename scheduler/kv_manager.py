"""Gives sequences the KV blocks that their tokens need, and takes them back."""

from collections import Counter
from collections.abc import Iterable

from shoal.scheduler.block_pool import BlockPool, num_blocks_for
from shoal.scheduler.sequence import Sequence


class KVCacheManager:
    """The only writer of block tables.

    Token ``i`` of a sequence lies in slot ``block_table[i // block_size] * block_size +
    i % block_size``. A sequence holds one reference to each block of its table::

        |<------- num_computed_tokens ------->|<- num_new_tokens ->|
        |<-------------- block_table ------------------>|<- new -->|  rounded up to whole blocks
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def max_num_tokens(self) -> int:
        """The longest sequence that the whole pool can hold."""
        return self.pool.num_blocks * self.pool.block_size

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks the table lacks to hold the sequence's first ``num_tokens`` tokens."""
        return max(0, num_blocks_for(num_tokens, self.block_size) - len(sequence.block_table))

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int) -> list[int] | None:
        """Extend the block table for the next tokens to compute.

        Returns the new blocks (often none), or None, and changes nothing, when they do not fit.
        """
        num_tokens = sequence.num_computed_tokens + num_new_tokens
        blocks = self.pool.allocate(self.num_missing_blocks(sequence, num_tokens))
        if blocks is not None:
            sequence.block_table.extend(blocks)
        return blocks

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks of the sequence and empty its table."""
        # Last block first: the head of a prompt is the likeliest to be asked for again.
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table.clear()

    def slot_mapping(self, sequence: Sequence, num_new_tokens: int) -> list[int]:
        """Slots of the next ``num_new_tokens`` tokens to compute, in order."""
        start = sequence.num_computed_tokens
        return [
            sequence.block_table[position // self.block_size] * self.block_size
            + position % self.block_size
            for position in range(start, start + num_new_tokens)
        ]

    def check_integrity(self, live_sequences: Iterable[Sequence]) -> None:
        """Assert that the tables of the live sequences account for every reference."""
        self.pool.check_integrity()
        holders: Counter[int] = Counter()
        for sequence in live_sequences:
            table = sequence.block_table
            assert len(set(table)) == len(table), f"sequence {sequence.seq_id} repeats a block"
            assert self.num_missing_blocks(sequence, sequence.num_computed_tokens) == 0
            holders.update(table)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == holders[block_id], f"block {block_id} leaked"
