"""Building blocks that the model families share: weights with the kernel that applies them."""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from shoal.backend.models.model_config import ModelConfig, RopeConfig
from shoal.kernels.linear import linear
from shoal.kernels.quantized_weights import Weight
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.silu_and_mul import silu_and_mul


class Weights:
    """Named tensors of a checkpoint, each taken once, so that none is held twice."""

    def __init__(self, tensors: MutableMapping[str, Weight]) -> None:
        self._tensors = tensors

    def take(self, name: str) -> torch.Tensor:
        """Remove and return a tensor that is never quantised."""
        weight = self.take_weight(name)
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name} must be dense")
        return weight

    def take_weight(self, name: str) -> Weight:
        """Remove and return a matrix of a product or an embedding: dense or quantised."""
        return self._tensors.pop(name)

    def take_linear(self, name: str, bias: bool) -> "Linear":
        """Remove ``name.weight`` (and ``name.bias``)."""
        return Linear(
            self.take_weight(f"{name}.weight"), self.take(f"{name}.bias") if bias else None
        )

    def take_norm(self, name: str, eps: float) -> "RMSNorm":
        """Remove ``name.weight``."""
        return RMSNorm(self.take(f"{name}.weight"), eps)


@dataclass(frozen=True, slots=True)
class Linear:
    """A product. What the weight's format is, dense or packed, its own class knows."""

    weight: Weight  # [out_features, in_features]
    bias: torch.Tensor | None = None  # [out_features]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: torch.Tensor  # [hidden_size]
    eps: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(silu_and_mul(self.gate(hidden), self.up(hidden)))


def rotary_inv_freq(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Inverse frequencies, float32 [head_dim / 2], with the arithmetic order of transformers."""
    rope = config.rope
    # Computed on the CPU whatever the device: a power may differ in its last bit elsewhere.
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
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
