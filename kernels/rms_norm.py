"""RMS normalisation over the last dimension."""

import torch


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``hidden / rms(hidden) * weight``, for [num_tokens, hidden_size] and [hidden_size].

    As in LlamaRMSNorm of transformers: normalised in float32, rounded to the model's dtype before
    the multiplication by the weight. The order of the roundings is part of the result.
    """
    wide = hidden.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(hidden.dtype)


def rms_norm_wide(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same with a float32 ``weight``, rounded once, at the end. As in Gemma3RMSNorm."""
    wide = hidden.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return ((wide * torch.rsqrt(variance + eps)) * weight).to(hidden.dtype)
