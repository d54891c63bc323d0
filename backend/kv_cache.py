"""The paged key/value cache: device memory in blocks, for all layers."""

import ctypes
import math
from collections.abc import Sequence

import torch

from shoal.backend.kv_layout import KVLayout
from shoal.kernels.huge_pages import Arena
from shoal.kernels.layer_cache import LayerCache, as_copyable, as_panels, fit_panels, scale_bytes
from shoal.scheduler.transfers import DeviceCopy


def bytes_per_block(layout: KVLayout, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Memory of one block of each group, over the group's layers, keys and values together."""
    return tuple(
        block_size
        * (
            layout.elements_per_token(group) * dtype.itemsize
            + layout.heads_per_token(group) * scale_bytes(dtype)
        )
        for group in range(len(layout.groups))
    )


class PagedKVCache:
    """Keys and values in blocks. The block pools own the numbering, this the memory.

    A group of layers has ``num_blocks[group]`` blocks. All memory is touched at once, so that a
    machine that is too small fails at start-up.

    With ``key_panels`` keys lie in panels, as the native kernels read them, wherever they fit; what
    fits is the same for all layers.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        key_panels: bool = False,
    ) -> None:
        assert len(num_blocks) == len(layout.groups)
        self.layout = layout
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self._storage: dict[int, torch.Tensor] = {}
        self._scales: dict[int, torch.Tensor] = {}
        self._addresses: dict[int, list[tuple[int, int]]] = {}  # by group
        arena = Arena() if torch.device(device).type == "cpu" else None
        for idx, layer in enumerate(layout.layers):
            if layout.source_of[idx] != idx:
                continue
            shape = (2, num_blocks[layout.group_of[idx]], block_size, layer.num_kv_heads)
            self._storage[idx] = _zeros((*shape, layer.head_dim), dtype, device, arena)
            if scale_bytes(dtype):
                self._scales[idx] = torch.zeros(shape, device=device)
        # Views, made once.
        head_dims = (layer.head_dim for layer in layout.layers)
        self.keys_in_panels = key_panels and fit_panels(dtype, block_size, head_dims)
        self._layers = [self._view(source) for source in layout.source_of]

    @property
    def device(self) -> torch.device:
        return self._layers[0].keys.device

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        tensors = (*self._storage.values(), *self._scales.values())
        return sum(tensor.nbytes for tensor in tensors)

    def copy_blocks(self, copies: Sequence[DeviceCopy]) -> None:
        """Copy whole blocks, one after another."""
        for copy in copies:
            if self.device.type != "cpu":
                for part in self.block_parts(copy.group):
                    part[:, copy.target] = part[:, copy.source]
                continue
            # A block's part in each layer takes torch longer to find than to copy.
            for block in (copy.source, copy.target):
                assert 0 <= block < self.num_blocks[copy.group]
            for address, size in self._block_addresses(copy.group):
                ctypes.memmove(address + copy.target * size, address + copy.source * size, size)

    def layer(self, layer_idx: int) -> LayerCache:
        """All that is kept for a layer, written in place by the kernels."""
        return self._layers[layer_idx]

    def keys(self, layer_idx: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], or panels, as stored."""
        return self._layers[layer_idx].keys

    def values(self, layer_idx: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim], as stored."""
        return self._layers[layer_idx].values

    def _view(self, layer_idx: int) -> LayerCache:
        keys, values = self._storage[layer_idx]
        if self.keys_in_panels:
            keys = as_panels(keys)
        return LayerCache(keys, values, *self._scales.get(layer_idx, ()))

    def block_parts(self, group: int) -> tuple[torch.Tensor, ...]:
        """All tensors in which a block of the group has its part; the block is dimension 1.

        Whoever copies these copies the block: keys, values and scales.
        """
        layers = self.layout.groups[group].layers
        parts = [as_copyable(self._storage[idx]) for idx in layers]
        return (*parts, *(self._scales[idx] for idx in layers if idx in self._scales))

    def _block_addresses(self, group: int) -> list[tuple[int, int]]:
        """Where the first block's keys, values and scales of each layer lie in memory, and how many
        bytes of each a block has; the next block's follow. Worked out once."""
        known = self._addresses.get(group)
        if known is None:
            halves = [half for part in self.block_parts(group) for half in part]
            assert all(half.is_contiguous() for half in halves)
            known = [(half.data_ptr(), half[0].nbytes) for half in halves]
            self._addresses[group] = known
        return known


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, arena: Arena | None
) -> torch.Tensor:
    """Layers lie one after another in the arena: in pages of their own each would waste some."""
    if arena is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return arena.empty(math.prod(shape), dtype).view(shape).zero_()
