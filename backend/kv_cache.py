"""The paged key/value cache: device memory in blocks, for all layers."""

import torch


def bytes_per_block(
    num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Memory of one block over all layers, keys and values together."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


class PagedKVCache:
    """Keys and values of ``num_blocks`` blocks. The block pool owns the numbering, this the memory.

    All memory is touched at once, so that a machine that is too small fails at start-up.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        # Views, made once: [num_blocks, block_size, num_kv_heads, head_dim] a layer.
        self._keys = list(self._storage[:, 0].unbind(0))
        self._values = list(self._storage[:, 1].unbind(0))

    @property
    def num_layers(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes

    def keys(self, layer_idx: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], written in place by the kernels."""
        return self._keys[layer_idx]

    def values(self, layer_idx: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], written in place by the kernels."""
        return self._values[layer_idx]
