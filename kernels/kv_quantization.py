"""Keys and values in 8 bits: each head of each token with a scale of its own."""

import torch

from shoal.kernels.layer_cache import SCALED_DTYPES


def quantize_heads(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``states`` [..., head_dim] in int8 or float8_e4m3fn, and float32 scales [...].

    A scale is the head's largest magnitude over the type's largest; a NaN anywhere makes it NaN,
    so that it is not lost.
    """
    wide = states.float()
    scales = wide.abs().amax(dim=-1) / SCALED_DTYPES[dtype]
    quotients = wide / torch.where(scales == 0, 1.0, scales)[..., None]
    if dtype == torch.int8:
        quotients = quotients.round().nan_to_num(0.0)
    return quotients.to(dtype), scales


def dequantize_heads(
    stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What ``quantize_heads`` stored, in ``dtype``."""
    return (stored.float() * scales[..., None]).to(dtype)
