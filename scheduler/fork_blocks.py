"""The blocks of a sequence that starts from what another one has computed."""

from shoal.scheduler.kv_manager import KVCacheManager
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.transfers import DeviceCopy


def fork_blocks(
    kv: KVCacheManager, parent: Sequence, child: Sequence, num_tokens: int
) -> list[DeviceCopy]:
    """Start the empty table of ``child`` with the first ``num_tokens`` tokens of ``parent``.

    They are computed, and the child has the same ones and more. Full blocks are shared; a
    part-filled last one is copied, as both will write to theirs. Returns what must be copied before
    anything else is written. Without room the child has less to start from.
    """
    num_full, rest = divmod(num_tokens, kv.block_size)
    if kv.prefix_tree is None:
        if not _share_blocks(kv, parent, child, num_tokens):
            return []
    else:
        if kv.num_shared_blocks(parent) < num_full:
            kv.publish_prefix(parent)
        kv.attach_prefix(child)
        if child.num_computed_tokens != num_full * kv.block_size:
            return []
    if not rest or not all(window.holds(parent, num_full) for window in kv.windows):
        return []
    if kv.allocate_slots(child, rest) is None:
        kv.free(child, cache=False)
        child.num_computed_tokens = 0
        return []
    child.num_computed_tokens = num_tokens
    return [
        DeviceCopy(group, parent.block_tables[group][num_full], table[num_full])
        for group, table in enumerate(child.block_tables)
    ]


def copy_last_block(kv: KVCacheManager, sequence: Sequence) -> list[DeviceCopy]:
    """Of a sequence that the prefix tree has whole, leave one token to compute.

    It shares all blocks but the last, which it will write to: of that it gets a copy, where there
    is a free block. What the tree has there may go on otherwise after the sequence's tokens, as it
    does after a prompt that was answered. So the last token's keys and values are present, too, and
    only its logits are lacking. Returns what must be copied before anything else is written.
    """
    num_computed, num_tokens = sequence.num_computed_tokens, sequence.num_tokens
    starts_at_last = num_computed > 0 and num_tokens - num_computed <= kv.block_size
    if not starts_at_last or kv.prefix_tree is None or not kv.pool.num_free:
        return []
    if kv.num_shared_blocks(sequence) * kv.block_size != num_computed:
        return []
    keys = sequence.cache_keys
    match = kv.prefix_tree.match(sequence.cache_salt, keys, num_computed)
    block = kv.prefix_tree.block_after(match, keys[num_computed:])
    if block is None:
        return []
    sources = [block]
    for window in kv.windows:
        beside = window.cached_beside(block)
        if beside is None:
            return []
        sources.append(beside)
    if not _allocate_beside(kv, sequence, sources[1:]):
        return []
    sequence.num_computed_tokens = num_tokens - 1
    sequence.num_present_tokens = num_tokens
    return [
        DeviceCopy(group, source, table[-1])
        for group, (source, table) in enumerate(zip(sources, sequence.block_tables, strict=True))
    ]


def _allocate_beside(kv: KVCacheManager, sequence: Sequence, kept: list[int]) -> bool:
    """Allocate what the sequence's tokens need; the windows' cached blocks ``kept`` stay."""
    for window, block in zip(kv.windows, kept, strict=True):
        window.pool.incref((block,))
    blocks = kv.allocate_slots(sequence, sequence.num_uncomputed_tokens)
    for window, block in zip(kv.windows, kept, strict=True):
        window.pool.free((block,))
    return blocks is not None


def _share_blocks(kv: KVCacheManager, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
    """Let the child hold the parent's full blocks of its first tokens, if it still has them."""
    if not all(window.can_share(parent, num_tokens) for window in kv.windows):
        return False
    num_full = num_tokens // kv.block_size
    blocks = parent.block_table[:num_full]
    kv.pool.incref(blocks)
    child.block_table.extend(blocks)
    for window in kv.windows:
        window.share(parent, child, num_tokens)
    child.num_computed_tokens = num_full * kv.block_size
    return True
