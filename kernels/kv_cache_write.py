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
    if cache.key_scales is not None:
        key = _quantize(key, cache.keys.dtype, cache.key_scales, slot_mapping)
    if cache.value_scales is not None:
        value = _quantize(value, cache.values.dtype, cache.value_scales, slot_mapping)
    cache.write_keys(slot_mapping, key.to(cache.keys.dtype))
    slots = as_copyable(cache.values).flatten(0, 1)
    slots.index_copy_(0, slot_mapping, as_copyable(value.to(cache.values.dtype)))


def _quantize(
    states: torch.Tensor, stored: torch.dtype, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> torch.Tensor:
    quantized, new_scales = quantize_heads(states, stored)
    scales.flatten(0, 1).index_copy_(0, slot_mapping, new_scales)
    return quantized
