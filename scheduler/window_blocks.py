"""The blocks of layers with a sliding window: only what the window still needs is held."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from shoal.scheduler.block_pool import BlockPool, num_blocks_for
from shoal.scheduler.sequence import Sequence as TokenSequence

HOLE = 0  # the entry of a dropped block; no pool of a windowed group has a block 0


def most_blocks_a_sequence(window: int, block_size: int) -> int:
    """Blocks that a sequence holds beside those of the tokens it computes in a step.

    A window starts and a step's tokens end anywhere in a block: each costs one block more.
    """
    return num_blocks_for(window - 1, block_size) + 2


def most_window_blocks(
    window: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """Blocks with which a window's pool never runs out, however long the sequences are."""
    per_sequence = most_blocks_a_sequence(window, block_size)
    return max_num_seqs * per_sequence + num_blocks_for(max_num_batched_tokens, block_size)


class WindowBlocks:
    """The block tables and the cached prefix blocks of one windowed KV group.

    A table is as long as the first group's would be without lossy eviction, and starts with a hole
    for each block that its window has left behind. A cached block lies beside the block of the
    first group that the prefix tree has for the same tokens, goes when that one goes, and may go
    before, least recently used first.

    Each entry of a table that is no hole is one holder of its block in the pool, and the cache is
    one more; so a block with the cache alone may be dropped.
    """

    def __init__(self, pool: BlockPool, window: int, group: int) -> None:
        assert window > 0
        assert group > 0
        assert pool.first_id > HOLE
        self.pool = pool
        self.window = window
        self.group = group
        self._cached: OrderedDict[int, int] = OrderedDict()  # tree block -> ours, by last use

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def cached_blocks(self) -> set[int]:
        return set(self._cached.values())

    def max_num_running(self, num_full_blocks: int, max_num_batched_tokens: int) -> int | None:
        """How many sequences may run so that the pool never runs out; None: any number.

        A pool no smaller than the first group's has a block for each of those.
        """
        if self.pool.num_blocks >= num_full_blocks:
            return None
        num_blocks = self.pool.num_blocks - num_blocks_for(
            max_num_batched_tokens, self.pool.block_size
        )
        return max(0, num_blocks) // most_blocks_a_sequence(self.window, self.pool.block_size)

    def table(self, sequence: TokenSequence) -> list[int]:
        """The group's block table of a sequence, made when first asked for."""
        tables = sequence.block_tables
        while len(tables) <= self.group:
            tables.append([])
        return tables[self.group]

    def has_droppable(self, sequence: TokenSequence) -> bool:
        """Whether the window has left a held block behind."""
        table = self.table(sequence)
        end = min(self._first_needed(sequence.num_computed_tokens), len(table))
        return end > 0 and table[end - 1] != HOLE

    def drop_behind(self, sequence: TokenSequence) -> None:
        """Give up the blocks that no token still to be computed can see."""
        table = self.table(sequence)
        idx = min(self._first_needed(sequence.num_computed_tokens), len(table)) - 1
        while idx >= 0 and table[idx] != HOLE:
            self.pool.free((table[idx],))
            table[idx] = HOLE
            idx -= 1

    def make_room(self, num_blocks: int) -> bool:
        """Drop cached blocks until so many are free; False when that cannot be had."""
        for _ in range(len(self._cached)):
            if num_blocks <= self.pool.num_free:
                break
            beside, block_id = self._cached.popitem(last=False)
            if self.pool.ref_count(block_id) > 1:  # a sequence reads it: that is a use
                self._cached[beside] = block_id
            else:
                self.pool.free((block_id,))
        return num_blocks <= self.pool.num_free

    def extend(self, sequence: TokenSequence, num_blocks: int) -> None:
        """Add blocks to the table, after ``make_room``."""
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None, "no room was made"
        self.table(sequence).extend(blocks)

    def held(self, sequence: TokenSequence, num_blocks: int) -> list[int | None]:
        """The first entries of the table, None for holes."""
        return [None if block == HOLE else block for block in self.table(sequence)[:num_blocks]]

    def refill(self, sequence: TokenSequence, held: Sequence[bool]) -> None:
        """Fill the empty table with new blocks where one was held, which is at its end."""
        table = self.table(sequence)
        assert not table
        num_blocks = sum(held)
        table += [HOLE] * (len(held) - num_blocks)
        has_room = self.make_room(num_blocks)
        assert has_room, "a window's pool ran out"
        self.extend(sequence, num_blocks)

    def num_usable(self, tree_blocks: Sequence[int], num_blocks: int) -> int:
        """The most of the first ``num_blocks`` tree blocks after which a sequence can go on: all
        that its window then needs is cached."""
        while num_blocks:
            first = self._first_needed(num_blocks * self.pool.block_size)
            needed = range(num_blocks - 1, first - 1, -1)
            gap = next((idx for idx in needed if tree_blocks[idx] not in self._cached), None)
            if gap is None:
                break
            num_blocks = gap
        return num_blocks

    def cached_beside(self, tree_block: int) -> int | None:
        """What is cached for the same tokens as this block of the tree."""
        return self._cached.get(tree_block)

    def attach(self, sequence: TokenSequence, tree_blocks: Sequence[int]) -> None:
        """Fill the empty table with what is needed after all these tree blocks."""
        table = self.table(sequence)
        assert not table
        first = self._first_needed(len(tree_blocks) * self.pool.block_size)
        table += [HOLE] * first
        for beside in tree_blocks[first:]:
            self._cached.move_to_end(beside)
            table.append(self._cached[beside])
        self.pool.incref(table[first:])

    def share(self, parent: TokenSequence, child: TokenSequence, num_tokens: int) -> None:
        """Fill the child's empty table with the parent's full blocks of the first tokens, as far
        as what comes after them needs these."""
        table = self.table(child)
        assert not table
        first = self._first_needed(num_tokens)
        table += [HOLE] * first
        table += self.table(parent)[first : num_tokens // self.pool.block_size]
        self.pool.incref(table[first:])

    def holds(self, sequence: TokenSequence, idx: int) -> bool:
        """Whether the window has not left this block of the table behind."""
        return self.table(sequence)[idx] != HOLE

    def can_share(self, parent: TokenSequence, num_tokens: int) -> bool:
        """Whether the parent holds what a sequence with its first ``num_tokens`` tokens needs."""
        first = self._first_needed(num_tokens)
        table = self.table(parent)
        return first >= len(table) or table[first] != HOLE

    def publish(self, sequence: TokenSequence, tree_blocks: Sequence[int]) -> None:
        """Cache the held blocks beside the sequence's tree blocks.

        Where one was cached already, the sequence reads that one and gives up its own.
        """
        table = self.table(sequence)
        for idx in range(len(tree_blocks) - 1, -1, -1):
            own = table[idx]
            if own == HOLE:
                break
            beside = tree_blocks[idx]
            cached = self._cached.get(beside)
            if cached is None:
                self._cached[beside] = own
                self.pool.incref((own,))
                continue
            self._cached.move_to_end(beside)
            if cached != own:
                self.pool.incref((cached,))
                self.pool.free((own,))
                table[idx] = cached

    def forget(self, tree_blocks: Iterable[int]) -> None:
        """The tree gave these blocks up."""
        for beside in tree_blocks:
            block_id = self._cached.pop(beside, None)
            if block_id is not None:
                self.pool.free((block_id,))

    def release(self, sequence: TokenSequence) -> None:
        """Give up all that the sequence holds and empty its table."""
        table = self.table(sequence)
        self.pool.free(block_id for block_id in reversed(table) if block_id != HOLE)
        table.clear()

    def check_integrity(self, holding: Iterable[TokenSequence], tree_blocks: set[int]) -> None:
        """Assert that tables and cache account for every block, and hold what is needed."""
        self.pool.check_integrity()
        assert tree_blocks.issuperset(self._cached)
        holders = Counter(self._cached.values())
        assert len(holders) == len(self._cached), "a block is cached twice"
        for sequence in holding:
            table = self.table(sequence)
            num_evicted = sequence.num_evicted_tokens // self.pool.block_size
            assert len(table) == len(sequence.block_table) + num_evicted
            held = [block_id for block_id in table if block_id != HOLE]
            assert len(set(held)) == len(held), f"sequence {sequence.seq_id} repeats a block"
            assert HOLE not in table[len(table) - len(held) :], "a hole behind a held block"
            needed = len(table) - self._first_needed(sequence.num_computed_tokens)
            assert len(held) >= needed, f"sequence {sequence.seq_id} lacks a needed block"
            holders.update(held)
        for block_id in self.pool.block_ids:
            assert self.pool.ref_count(block_id) == holders[block_id], f"block {block_id} leaked"

    def _first_needed(self, num_computed_tokens: int) -> int:
        """Index of the block of the first token that the next one sees."""
        return max(0, num_computed_tokens - self.window + 1) // self.pool.block_size
