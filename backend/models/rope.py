"""Inverse frequencies of rotary position embeddings, with the arithmetic order of transformers."""

import math

import torch

from shoal.backend.models.model_config import RopeConfig


def rotary_inv_freq(rope: RopeConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    """Inverse frequencies, float32 [head_dim / 2]."""
    # Computed on the CPU whatever the device: a power may differ in its last bit elsewhere.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers = float(rope.theta) ** exponents
    if rope.kind == "yarn":
        return _yarn_inv_freq(powers, rope, head_dim).to(device)
    inv_freq = 1.0 / powers
    if rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3_inv_freq(inv_freq, rope)
    elif rope.kind == "factors":
        inv_freq = inv_freq / torch.tensor(rope.factors, dtype=torch.float32)
    return inv_freq.to(device)


def _llama3_inv_freq(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    low_wavelen = rope.original_max_positions / rope.low_freq_factor
    high_wavelen = rope.original_max_positions / rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / rope.factor, inv_freq)
    smooth = (rope.original_max_positions / wavelen - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_medium = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(is_medium, blended, scaled)


def _yarn_inv_freq(powers: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN (arXiv:2309.00071): fast dimensions as they are, slow ones divided by the factor."""
    extrapolated = 1.0 / powers
    interpolated = 1.0 / (rope.factor * powers)
    low, high = (
        head_dim
        * math.log(rope.original_max_positions / (rotations * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((steps - low) / (high - low), 0, 1)
    return interpolated * (1 - kept) + extrapolated * kept
