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
    """Of a sequence that the prefix tree has whole, in full blocks, leave one token to compute.

    It shares all blocks but the last, which it will write to: of that it gets a copy, where there
    is a free block. So that token's keys and values are present, too, and only its logits are
    lacking. Returns what must be copied before anything else is written.
    """
    num_tokens, size = sequence.num_tokens, kv.block_size
    starts_at_last = size > 1 and 0 < sequence.num_computed_tokens == num_tokens - size
    if not starts_at_last or kv.windows or kv.prefix_tree is None or not kv.pool.num_free:
        return []
    if kv.num_shared_blocks(sequence) * size != sequence.num_computed_tokens:
        return []
    match = kv.prefix_tree.match(sequence.cache_salt, sequence.cache_keys, num_tokens)
    if match.num_tokens < num_tokens or kv.allocate_slots(sequence, size - 1) is None:
        return []
    sequence.num_computed_tokens = num_tokens - 1
    sequence.num_present_tokens = num_tokens
    return [DeviceCopy(0, match.block_ids[-1], sequence.block_table[-1])]


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
