"""Storing new keys and values into the paged cache."""

import torch


def kv_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write ``key`` and ``value`` [num_tokens, num_kv_heads, head_dim]; mutates the caches.

    The caches are [num_blocks, block_size, num_kv_heads, head_dim]; ``slot_mapping`` int64
    [num_tokens] holds block_id * block_size + offset. Slots are distinct within a step.
    """
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
