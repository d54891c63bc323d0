"""The pool of KV blocks: which are free, and how many sequences hold each of the others."""

from collections import deque
from collections.abc import Iterable


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """``num_blocks`` block ids from ``first_id`` on, each free or held by ``ref_count`` holders.

    The free list is first in, first out, so that a freed block keeps its contents as long as
    possible: a prefix cache may then find them again.
    """

    def __init__(self, num_blocks: int, block_size: int, first_id: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1.")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.first_id = first_id
        self._free: deque[int] = deque(self.block_ids)
        self._ref_counts = [0] * (first_id + num_blocks)

    @property
    def block_ids(self) -> range:
        """All ids, free or not."""
        return range(self.first_id, self.first_id + self.num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many holders the block has."""
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take free blocks, each with one holder; None, and no change, when too few are free."""
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in blocks:
            self._ref_counts[block_id] = 1
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block, all of which are held already."""
        for block_id in blocks:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is free"
            self._ref_counts[block_id] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take a holder from each block; one without holders joins the end of the free list."""
        for block_id in blocks:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self) -> None:
        """Assert that the free list holds each block without holders, once, and no other."""
        unheld = [block_id for block_id in self.block_ids if self._ref_counts[block_id] == 0]
        assert sorted(self._free) == unheld, "free list and ref counts disagree"
        assert all(count >= 0 for count in self._ref_counts)
