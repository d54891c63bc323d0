"""Storing new keys and values into the paged cache."""

import torch

from shoal.kernels.kv_quantization import quantize_heads
from shoal.kernels.layer_cache import LayerCache, as_copyable


def kv_cache_write(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """Write ``key`` and ``value`` [num_tokens, num_kv_heads, head_dim]; mutates the cache.

    ``slot_mapping`` int64 [num_tokens] holds block_id * block_size + offset. Slots are distinct
    within a step.
    """
    _write(key, cache.keys, cache.key_scales, slot_mapping)
    _write(value, cache.values, cache.value_scales, slot_mapping)


def _write(
    states: torch.Tensor,
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    if scales is not None:
        states, new_scales = quantize_heads(states, stored.dtype)
        scales.flatten(0, 1).index_copy_(0, slot_mapping, new_scales)
    slots = as_copyable(stored).flatten(0, 1)
    slots.index_copy_(0, slot_mapping, as_copyable(states.to(stored.dtype)))
