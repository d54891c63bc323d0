"""Rotary position embedding, with the two halves of a head as the rotated pair (NeoX order)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Cosines and sines of one step's positions, the same for all layers."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim], model dtype
    sin: torch.Tensor  # [num_tokens, 1, head_dim], model dtype


def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
) -> RotaryAngles:
    """Angles for ``positions`` [num_tokens], from ``inv_freq`` float32 [head_dim / 2].

    Cosines and sines are multiplied by ``factor``. Computed in float32 and then rounded, as in
    LlamaRotaryEmbedding of transformers.
    """
    freqs = positions[:, None].float() * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1)[:, None, :]
    return RotaryAngles((emb.cos() * factor).to(dtype), (emb.sin() * factor).to(dtype))


def rotary_embedding(states: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Rotate ``states`` [num_tokens, num_heads, head_dim]; returns a new tensor.

    As apply_rotary_pos_emb of transformers: x * cos + rotate_half(x) * sin.
    """
    half = states.shape[-1] // 2
    rotated = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states * angles.cos) + (rotated * angles.sin)
