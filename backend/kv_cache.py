"""The paged key/value cache: device memory in blocks, for all layers."""

from collections.abc import Sequence

import torch

from shoal.backend.kv_layout import KVLayout
from shoal.kernels.layer_cache import LayerCache


def bytes_per_block(layout: KVLayout, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Memory of one block of each group, over the group's layers, keys and values together."""
    return tuple(
        layout.elements_per_token(group) * block_size * dtype.itemsize
        for group in range(len(layout.groups))
    )


class PagedKVCache:
    """Keys and values in blocks. The block pools own the numbering, this the memory.

    A group of layers has ``num_blocks[group]`` blocks. All memory is touched at once, so that a
    machine that is too small fails at start-up.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        assert len(num_blocks) == len(layout.groups)
        self.layout = layout
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self._storage = {
            idx: torch.zeros(
                (
                    2,
                    num_blocks[layout.group_of[idx]],
                    block_size,
                    layer.num_kv_heads,
                    layer.head_dim,
                ),
                dtype=dtype,
                device=device,
            )
            for idx, layer in enumerate(layout.layers)
            if layout.source_of[idx] == idx
        }
        # Views, made once: [num_blocks, block_size, num_kv_heads, head_dim] a layer.
        self._keys = [self._storage[source][0] for source in layout.source_of]
        self._values = [self._storage[source][1] for source in layout.source_of]

    @property
    def device(self) -> torch.device:
        return self._keys[0].device

    @property
    def num_layers(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes for storage in self._storage.values())

    def keys(self, layer_idx: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], written in place by the kernels."""
        return self._keys[layer_idx]

    def values(self, layer_idx: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], written in place by the kernels."""
        return self._values[layer_idx]

    def layer(self, layer_idx: int) -> LayerCache:
        """All that is kept for a layer."""
        return LayerCache(self._keys[layer_idx], self._values[layer_idx])

    def block_parts(self, group: int) -> tuple[torch.Tensor, ...]:
        """All tensors in which a block of the group has its part; the block is dimension 1."""
        return tuple(self._storage[layer] for layer in self.layout.groups[group].layers)
