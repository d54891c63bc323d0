"""RMS normalisation as Gemma 4 has it."""

import torch


def rms_norm_power(hidden: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """``hidden / rms(hidden) * weight`` over the last dimension; weight [hidden_size] or none.

    As in Gemma4RMSNorm of transformers: all in float32, with a power of -1/2 instead of a
    reciprocal root, and rounded to the model's dtype once.
    """
    wide = hidden.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True) + eps
    normed = wide * torch.pow(mean_square, -0.5)
    if weight is not None:
        normed = normed * weight.float()
    return normed.to(hidden.dtype)
