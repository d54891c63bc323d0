"""The keys and values of one layer, in whatever type they are stored."""

from dataclasses import dataclass

import torch

# 8-bit types; the largest magnitude that each holds.
SCALED_DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of the paged cache, written in place by the kernels.

    In the 8-bit types a key or value of one token and head is stored with a scale of its own: its
    largest magnitude over the largest that the type holds. So what is stored depends on that token
    alone, and a block never has to be scaled anew.
    """

    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # the same
    key_scales: torch.Tensor | None = None  # float32 [num_blocks, block_size, num_kv_heads]
    value_scales: torch.Tensor | None = None  # the same

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch's indexing knows: of 8-bit floats it lacks some."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes beside a stored head of one token."""
    return torch.float32.itemsize if dtype in SCALED_DTYPES else 0
