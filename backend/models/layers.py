"""Building blocks that the model families share: weights with the kernel that applies them."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch

from shoal.kernels.gelu_and_mul import gelu_and_mul
from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.linear import linear
from shoal.kernels.paged_attention import AttentionMetadata, paged_attention
from shoal.kernels.quantized_weights import Weight
from shoal.kernels.rms_norm import rms_norm, rms_norm_wide
from shoal.kernels.rotary_embedding import RotaryAngles, rotary_embedding
from shoal.kernels.silu_and_mul import silu_and_mul

GATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_and_mul,
}


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

    def take_linear(self, name: str, bias: bool = False) -> "Linear":
        """Remove ``name.weight`` (and ``name.bias``)."""
        return Linear(
            self.take_weight(f"{name}.weight"), self.take(f"{name}.bias") if bias else None
        )

    def take_norm(self, name: str, eps: float, unit_offset: bool = False) -> "RMSNorm":
        """Remove ``name.weight``; with ``unit_offset`` the norm multiplies by 1 + weight."""
        weight = self.take(f"{name}.weight")
        return RMSNorm(1.0 + weight.float() if unit_offset else weight, eps, wide=unit_offset)


@dataclass(frozen=True, slots=True)
class Linear:
    """A product. What the weight's format is, dense or packed, its own class knows."""

    weight: Weight  # [out_features, in_features]
    bias: torch.Tensor | None = None  # [out_features]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return linear(states, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: torch.Tensor  # [hidden_size]; float32 if wide
    eps: float
    wide: bool = False  # multiplied in float32 and rounded once, as Gemma does

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        norm = rms_norm_wide if self.wide else rms_norm
        return norm(hidden, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate: Linear
    up: Linear
    down: Linear
    activation: str = "silu"  # in GATED_ACTIVATIONS

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        activate = GATED_ACTIVATIONS[self.activation]
        return self.down(activate(self.gate(hidden), self.up(hidden)))


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries, keys and values by head, normalised and rotated as the family has it."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    head_dim: int
    scale: float  # of the scores
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    softcap: float | None = None

    def __call__(
        self,
        hidden: torch.Tensor,
        angles: RotaryAngles | None,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write this layer's keys and values to the cache, then attend over the cache.

        ``angles`` is None where a layer knows no positions; the window is the metadata's.
        """
        query = self._heads(self.q_proj(hidden), self.q_norm, angles)
        key = self._heads(self.k_proj(hidden), self.k_norm, angles)
        value = self._heads(self.v_proj(hidden), None, None)
        kv_cache_write(key, value, cache, slot_mapping)
        output = paged_attention(query, cache, metadata, self.scale, self.softcap)
        return self.o_proj(output.flatten(1))

    def _heads(
        self, states: torch.Tensor, norm: RMSNorm | None, angles: RotaryAngles | None
    ) -> torch.Tensor:
        heads = states.view(states.shape[0], -1, self.head_dim)
        if norm is not None:
            heads = norm(heads)
        return heads if angles is None else rotary_embedding(heads, angles)
