"""The keys and values of one layer, in whatever type they are stored."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

KEY_PANEL = 16  # tokens whose keys lie together, where keys lie in panels

# 8-bit types; the largest magnitude that each holds.
SCALED_DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of the paged cache, written in place by the kernels.

    In the 8-bit types a key or value of one token and head is stored with a scale of its own: its
    largest magnitude over the largest that the type holds. So what is stored depends on that token
    alone, and a block never has to be scaled anew.

    Keys may lie in panels, in the order in which the native kernels read them: then ``keys`` is
    [num_blocks, block_size / 16, num_kv_heads, head_dim / 2, 16, 2]. A block takes the same bytes.
    """

    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], or panels
    values: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    key_scales: torch.Tensor | None = None  # float32 [num_blocks, block_size, num_kv_heads]
    value_scales: torch.Tensor | None = None  # the same

    @property
    def block_size(self) -> int:
        return self.values.shape[1]

    @property
    def keys_in_panels(self) -> bool:
        return self.keys.dim() == 6

    def read_keys(self, slots: torch.Tensor) -> torch.Tensor:
        """As stored: [len(slots), num_kv_heads, head_dim]."""
        if not self.keys_in_panels:
            rows = as_copyable(self.keys).flatten(0, 1).index_select(0, slots)
            return rows.view(self.keys.dtype)
        panels, columns = slots // KEY_PANEL, slots % KEY_PANEL
        return self.keys.flatten(0, 1)[panels, :, :, columns].flatten(2)

    def write_keys(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """``keys`` [len(slots), num_kv_heads, head_dim], of the type that is stored."""
        if not self.keys_in_panels:
            as_copyable(self.keys).flatten(0, 1).index_copy_(0, slots, as_copyable(keys))
            return
        panels, columns = slots // KEY_PANEL, slots % KEY_PANEL
        self.keys.flatten(0, 1)[panels, :, :, columns] = keys.unflatten(2, (-1, 2))


def fit_panels(stored: torch.dtype, block_size: int, head_dims: Iterable[int]) -> bool:
    """Whether keys can lie in panels."""
    return (
        stored == torch.bfloat16
        and block_size % KEY_PANEL == 0
        and all(head_dim % 2 == 0 for head_dim in head_dims)
    )


def as_panels(keys: torch.Tensor) -> torch.Tensor:
    """The same memory, [num_blocks, block_size, num_kv_heads, head_dim], as panels. What it holds
    is another key then."""
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    panels = (block_size // KEY_PANEL, num_kv_heads, head_dim // 2, KEY_PANEL, 2)
    return keys.view(num_blocks, *panels)


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch's indexing knows: of 8-bit floats it lacks some."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes beside a stored head of one token."""
    return torch.float32.itemsize if dtype in SCALED_DTYPES else 0
