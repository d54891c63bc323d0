"""Gives sequences the KV blocks that their tokens need, and takes them back."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from shoal.scheduler.block_pool import BlockPool, num_blocks_for
from shoal.scheduler.host_tier import HostTier
from shoal.scheduler.outputs import Restored
from shoal.scheduler.prefix_nodes import PrefixLock, PrefixMatch
from shoal.scheduler.prefix_tree import PADDING, PrefixTree
from shoal.scheduler.return_cost import UNMEASURED, ReturnPlan, ReturnWay
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.transfers import DeviceCopy, Transfer
from shoal.scheduler.window_blocks import WindowBlocks


@dataclass(slots=True)
class _Shared:
    """The first blocks of a sequence's table: the tree's, kept from eviction by ``lock``."""

    lock: PrefixLock
    num_blocks: int


class KVCacheManager:
    """The only writer of block tables.

    The token at position p of a sequence has the cache index i = p - ``num_evicted_tokens`` (0
    unless the KV policy is lossy), and lies in slot ``block_table[i // block_size] * block_size +
    i % block_size``. With a prefix tree the first blocks of a table may be the tree's, shared with
    other sequences and full, so nobody writes to them; the rest are the sequence's own::

        |<------- num_computed_tokens ------->|<- num_new_tokens ->|
        |<-------------- block_table ------------------>|<- new -->|  rounded up to whole blocks
        |<- the tree's, locked ->|<- the sequence's own ---------->|

    With a tree, a block in use has one holder in the pool: the tree or a sequence. Only computed
    full blocks enter the tree; those that nobody has locked count as free, as they are evicted on
    demand. Without a tree, the full blocks of a fork have a holder in each of its sequences.

    All this is of the first KV group; ``windows`` are the others. Their pools never run out while
    no more than ``max_num_running`` sequences run, so the first group's blocks are what counts.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix_tree: PrefixTree | None = None,
        windows: SequenceOf[WindowBlocks] = (),
        host: HostTier | None = None,
    ) -> None:
        assert prefix_tree is None or prefix_tree.block_size == pool.block_size
        assert all(window.pool.block_size == pool.block_size for window in windows)
        self.pool = pool
        self.prefix_tree = prefix_tree
        self.windows = tuple(windows)
        self.host = host
        self._shared: dict[int, _Shared] = {}  # by seq_id
        self._device_copies: list[Transfer] = []  # without a host tier, which has them all

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had now, those of the cache that nobody reads included."""
        return self.pool.num_free + self._num_evictable

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that the prefix tree holds, locked ones included."""
        return self.prefix_tree.num_blocks if self.prefix_tree else 0

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that the prefix tree gave up so far."""
        return self.prefix_tree.num_evicted if self.prefix_tree else 0

    @property
    def max_num_tokens(self) -> int:
        """The longest sequence that the whole pool can hold."""
        return self.pool.num_blocks * self.pool.block_size

    def max_num_running(self, max_num_batched_tokens: int) -> int | None:
        """How many sequences may run so that no window's pool runs out; None: any number."""
        limits = [
            window.max_num_running(self.pool.num_blocks, max_num_batched_tokens)
            for window in self.windows
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks the table lacks to hold the sequence's first ``num_tokens`` tokens.

        Under a lossy policy the table never grows beyond the budget.
        """
        num_blocks = num_blocks_for(num_tokens - sequence.num_evicted_tokens, self.block_size)
        if sequence.eviction is not None:
            num_blocks = min(num_blocks, sequence.eviction.num_blocks)
        return max(0, num_blocks - len(sequence.block_table))

    def make_room(self, sequence: Sequence) -> None:
        """Drop blocks from the table of a lossy sequence if its budget is full."""
        eviction = sequence.eviction
        if eviction is None or eviction.room(sequence.num_held_tokens):
            return
        table = sequence.block_table
        dropped = eviction.evict()
        self.pool.free([table[idx] for idx in dropped])
        for idx in reversed(dropped):
            del table[idx]
        sequence.num_evicted_tokens += len(dropped) * self.block_size

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether cached blocks of a waiting sequence are on their way from disk."""
        if self.prefix_tree is None or self.host is None or self.host.prefixes is None:
            return False
        if sequence.eviction is not None or sequence.needs_whole_prompt:
            return False
        if self.host.prefixes.disk is None:
            return False
        limit = sequence.num_tokens - 1
        match = self.prefix_tree.match(sequence.cache_salt, sequence.cache_keys, limit)
        return self.host.prefixes.must_wait(
            sequence.seq_id,
            sequence.cache_salt,
            sequence.cache_keys,
            len(match.block_ids),
            limit,
        )

    def attach_prefix(self, sequence: Sequence) -> None:
        """Start the empty table of a sequence with what the prefix tree has of its tokens.

        At least one token is left to compute, since its logits are wanted. A lossy sequence finds
        nothing: which of its blocks go must depend on what it computed itself.
        """
        assert not sequence.block_table
        if sequence.eviction is not None:
            if not self._has_checkpoint(sequence):  # a checkpoint goes on with what it has dropped
                sequence.eviction.reset()
                sequence.num_evicted_tokens = 0
            return
        if (
            self.prefix_tree is None
            or self._has_checkpoint(sequence)
            or sequence.needs_whole_prompt
        ):
            return
        match = self.prefix_tree.match(
            sequence.cache_salt, sequence.cache_keys, sequence.num_tokens - 1
        )
        num_blocks = self._num_usable(match.block_ids)
        if num_blocks < len(match.block_ids):
            match = self.prefix_tree.match(
                sequence.cache_salt, sequence.cache_keys, num_blocks * self.block_size
            )
        if match.num_tokens:
            self._share(sequence, match)
            for window in self.windows:
                window.attach(sequence, match.block_ids)
            sequence.num_computed_tokens = match.num_tokens

    def num_shared_blocks(self, sequence: Sequence) -> int:
        """How many of the first blocks of its table are the tree's."""
        shared = self._shared.get(sequence.seq_id)
        return shared.num_blocks if shared else 0

    def order_copies(self, copies: SequenceOf[DeviceCopy]) -> None:
        """Have copies made before the next step, in order with all that is moved."""
        if self.host is not None:
            self.host.order(copies)
        else:
            self._device_copies += copies

    def take_transfers(self) -> tuple[Transfer, ...]:
        """All orders since the last time, in the order in which they must be carried out."""
        if self.host is not None:
            return self.host.take_transfers()
        transfers = tuple(self._device_copies)
        self._device_copies.clear()
        return transfers

    def publish_prefix(self, sequence: Sequence, finished: bool = False) -> None:
        """Put the computed full blocks of a sequence into the tree, for others to read from now on.

        Where the tree had the same tokens already, the sequence reads those and gives up its own.
        Of a finished one whose prompt ends inside a block that its answer has not filled, that
        block goes there, too, for the prompt's part of it.
        A lossy sequence shares nothing: its keys and values are not those of the whole prefix.
        """
        if self.prefix_tree is None or sequence.num_computed_tokens < self.block_size:
            return
        if sequence.eviction is not None:
            return
        keys = sequence.cache_keys[: sequence.num_computed_tokens]
        num_prompt, size = sequence.num_prompt_tokens, self.block_size
        if finished and num_prompt <= len(keys) < num_blocks_for(num_prompt, size) * size:
            keys = keys[:num_prompt] + [PADDING] * (-num_prompt % size)
        result = self.prefix_tree.insert(
            sequence.cache_salt,
            keys,
            sequence.block_table,
            sequence.num_output_tokens if finished else None,
        )
        before = self._shared.pop(sequence.seq_id, None)
        self._share(sequence, result.match)
        if before is not None:
            self.prefix_tree.unlock(before.lock)
        self.pool.free(result.duplicate_block_ids)
        for window in self.windows:
            window.publish(sequence, result.match.block_ids)

    def drop_behind_windows(self, sequence: Sequence) -> None:
        """Give up what no token still to be computed can see. Of a prompt it stays cached, as
        another prompt may branch off there."""
        if not any(window.has_droppable(sequence) for window in self.windows):
            return
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            self.publish_prefix(sequence)
        for window in self.windows:
            window.drop_behind(sequence)

    def has_slots(self, sequence: Sequence, num_new_tokens: int) -> bool:
        """Whether the table holds the next tokens to compute as it is, as it mostly does."""
        num_tokens = sequence.num_computed_tokens - sequence.num_evicted_tokens + num_new_tokens
        return num_tokens <= len(sequence.block_tables[0]) * self.pool.block_size

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int) -> list[int] | None:
        """Extend the block table for the next tokens to compute.

        Returns the new blocks (often none), or None, and changes nothing, when they do not fit.
        """
        num_tokens = sequence.num_computed_tokens + num_new_tokens
        num_blocks = self.num_missing_blocks(sequence, num_tokens)
        if num_blocks > self.num_free_blocks:
            return None
        if not all(window.make_room(num_blocks) for window in self.windows):
            return None
        blocks = self._extend(sequence, num_blocks)
        for window in self.windows:
            window.extend(sequence, num_blocks)
        return blocks

    def return_plan(self, sequence: Sequence) -> ReturnPlan:
        """How the sequence, if it lost its blocks now, would best get their contents again.

        What others read of its prefix in the tree stays on the device and costs nothing. What a
        fork shares without a tree stays there too, but not for this sequence.
        """
        shared = self._shared.get(sequence.seq_id)
        num_kept = 0
        if shared is not None and self.prefix_tree is not None:
            num_kept = self.prefix_tree.num_blocks_kept(shared.lock)
        num_tokens = sequence.num_computed_tokens - num_kept * self.block_size
        num_shared = sum(self.pool.ref_count(block) > 1 for block in sequence.block_table)
        lost = (num_tokens, len(sequence.block_table) - num_kept - num_shared)
        if self.host is None:
            return ReturnPlan(ReturnWay.RECOMPUTE, *lost, None, UNMEASURED.recompute(num_tokens))
        costs = self.host.costs
        recompute_s = costs.recompute(num_tokens)
        copy_s: float | None
        shares = self.prefix_tree is not None and sequence.eviction is None
        if shares and self.host.prefixes is not None:
            num_full, rest = divmod(num_tokens, self.block_size)
            copy_s = costs.copy((num_full,)) + costs.recompute(rest)
            return ReturnPlan.choose(*lost, recompute_s, ReturnWay.CACHED, copy_s)
        counts = [
            sum(block is not None for block in table) for table in self._computed_tables(sequence)
        ]
        has_room = num_tokens > 0 and self.host.pool.has_room(counts)
        copy_s = costs.copy(tuple(counts)) if has_room else None
        return ReturnPlan.choose(*lost, recompute_s, ReturnWay.CHECKPOINT, copy_s)

    def preempt(self, sequence: Sequence) -> ReturnPlan:
        """Take the blocks of a sequence, and see to it that it gets their contents again."""
        plan = self.return_plan(sequence)
        checkpoints = plan.way is ReturnWay.CHECKPOINT
        if checkpoints and self.host is not None:
            tables = self._computed_tables(sequence)
            self.host.save(sequence.seq_id, sequence.num_computed_tokens, tables)
        self.free(sequence, cache=not checkpoints)
        sequence.num_computed_tokens = 0
        return plan

    def bring_back(self, sequence: Sequence) -> Restored | None:
        """Have what the host holds of a sequence copied to the device.

        For one that was just admitted: room for these blocks is known to be there.
        """
        if self.host is None:
            return None
        checkpoint = self.host.pool.checkpoint(sequence.seq_id)
        if checkpoint is None:
            if sequence.eviction is not None or sequence.needs_whole_prompt:
                return None
            return self._bring_prefix(sequence, self.host)
        self._extend(sequence, len(checkpoint.tables[0]))
        for window, table in zip(self.windows, checkpoint.tables[1:], strict=True):
            window.refill(sequence, [block is not None for block in table])
        sequence.num_computed_tokens = checkpoint.num_tokens
        self.host.restore(sequence.seq_id, self._computed_tables(sequence))
        return Restored(sequence.seq_id, ReturnWay.CHECKPOINT, checkpoint.num_tokens)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is finished: the host keeps nothing of its own for it."""
        if self.host is not None:
            self.host.forget(sequence.seq_id)

    def free(self, sequence: Sequence, cache: bool = True, finished: bool = False) -> None:
        """Give back all blocks of the sequence and empty its table.

        With ``cache`` its computed full blocks go to the prefix tree, where the next turn of a
        chat, or the sequence itself after a preemption, finds them.
        """
        if cache:
            self.publish_prefix(sequence, finished)
        shared = self._shared.pop(sequence.seq_id, None)
        num_shared = 0
        if shared is not None and self.prefix_tree is not None:
            num_shared = shared.num_blocks
            self.prefix_tree.unlock(shared.lock)
        # Last block first: the head of a prompt is the likeliest to be asked for again.
        self.pool.free(reversed(sequence.block_table[num_shared:]))
        sequence.block_table.clear()
        sequence.num_present_tokens = 0
        for window in self.windows:
            window.release(sequence)

    def slot_mapping(self, sequence: Sequence, num_new_tokens: int) -> list[int]:
        """Slots of the next ``num_new_tokens`` tokens to compute, in order."""
        start = sequence.num_held_tokens
        return [
            sequence.block_table[index // self.block_size] * self.block_size
            + index % self.block_size
            for index in range(start, start + num_new_tokens)
        ]

    def check_integrity(self, holding: SequenceOf[Sequence]) -> None:
        """Assert that the tree and these sequences account for every block: free + cached + own =
        total."""
        self.pool.check_integrity()
        tree_blocks: set[int] = set()
        if self.prefix_tree is not None:
            self.prefix_tree.check_integrity()
            tree_blocks = set(self.prefix_tree.block_ids())
        holders: Counter[int] = Counter(tree_blocks)
        sharing = set(self._shared)
        for sequence in holding:
            table = sequence.block_table
            num_shared = self.num_shared_blocks(sequence)
            sharing.discard(sequence.seq_id)
            assert len(set(table)) == len(table), f"sequence {sequence.seq_id} repeats a block"
            assert self.num_missing_blocks(sequence, sequence.num_computed_tokens) == 0
            assert num_shared * self.block_size <= sequence.num_computed_tokens
            assert tree_blocks.issuperset(table[:num_shared])
            holders.update(table[num_shared:])
        assert not sharing, f"finished sequences {sharing} still lock the tree"
        for block_id in self.pool.block_ids:
            assert self.pool.ref_count(block_id) == holders[block_id], f"block {block_id} leaked"
        for window in self.windows:
            window.check_integrity(holding, tree_blocks)

    @property
    def _num_evictable(self) -> int:
        return self.prefix_tree.num_evictable if self.prefix_tree else 0

    def _num_usable(self, tree_blocks: SequenceOf[int]) -> int:
        """The most of these blocks after which every window finds what it needs."""
        num_blocks = len(tree_blocks)
        before = -1
        while num_blocks != before:
            before = num_blocks
            for window in self.windows:
                num_blocks = window.num_usable(tree_blocks, num_blocks)
        return num_blocks

    def _has_checkpoint(self, sequence: Sequence) -> bool:
        return self.host is not None and self.host.pool.checkpoint(sequence.seq_id) is not None

    def _computed_tables(self, sequence: Sequence) -> list[list[int | None]]:
        """Of each group, the blocks that hold computed tokens; None for dropped ones."""
        num_held = num_blocks_for(sequence.num_held_tokens, self.block_size)
        num_blocks = num_blocks_for(sequence.num_computed_tokens, self.block_size)
        first: list[int | None] = list(sequence.block_table[:num_held])
        return [first, *(window.held(sequence, num_blocks) for window in self.windows)]

    def _bring_prefix(self, sequence: Sequence, host: HostTier) -> Restored | None:
        """Add the prefix blocks that the host has after those of the tree."""
        prefixes = host.prefixes
        if prefixes is None or not host.costs.restoring_pays(self.block_size):
            return None
        start = len(sequence.block_table)
        path = (sequence.seq_id, sequence.cache_salt, sequence.cache_keys)
        limit = sequence.num_tokens - 1
        found = prefixes.match(*path, start, limit)
        prefixes.hold(sequence.seq_id, found)  # eviction, for room on the device, wants theirs
        host.restore_prefix(found, self._extend(sequence, len(found)))
        prefixes.forget_sequence(sequence.seq_id)
        if not found:
            return None
        num_tokens = len(found) * self.block_size
        sequence.num_computed_tokens += num_tokens
        return Restored(sequence.seq_id, ReturnWay.CACHED, num_tokens)

    def _extend(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Add blocks to the first group's table; they are known to be there."""
        if num_blocks > self.pool.num_free:
            self._evict(num_blocks - self.pool.num_free)
        blocks = self.pool.allocate(num_blocks)
        assert blocks is not None, "the tree evicted fewer blocks than it offered"
        sequence.block_table.extend(blocks)
        return blocks

    def _evict(self, num_blocks: int) -> None:
        assert self.prefix_tree is not None
        evicted = self.prefix_tree.evict(num_blocks)
        for window in self.windows:
            window.forget(evicted)
        self.pool.free(evicted)

    def _share(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Lock the matched path and make its blocks the beginning of the sequence's table."""
        assert self.prefix_tree is not None
        num_blocks = len(match.block_ids)
        lock = self.prefix_tree.lock(match)
        sequence.block_table[:num_blocks] = match.block_ids
        self._shared[sequence.seq_id] = _Shared(lock, num_blocks)
