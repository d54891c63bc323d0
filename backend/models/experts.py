"""A mixture of experts in place of an MLP: each token goes through a few of many gated MLPs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.backend.models.layers import GATED_ACTIVATIONS, GatedMLP, Linear
from shoal.kernels.expert_mlp import expert_mlp
from shoal.kernels.quantized_weights import Weight

GROUPED_ROW_BYTES = 16  # rows of a grouped product must be a multiple of this long


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token goes through, and how much each counts."""

    proj: Linear  # to num_experts
    num_per_token: int
    normalize: bool  # the chosen weights sum to 1
    float_weights: bool  # and stay float32

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 indices and weights of the chosen experts, [num_tokens, num_per_token] each."""
        logits = self.proj(hidden)
        scores = torch.softmax(logits.float(), dim=-1)
        weights, chosen = torch.topk(scores, self.num_per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights if self.float_weights else weights.to(logits.dtype)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Dense experts, as one grouped product each way: the default form of transformers."""

    router: Router
    gate_up: torch.Tensor  # [num_experts, 2 * intermediate_size, hidden_size], gate first
    down: torch.Tensor  # [num_experts, hidden_size, intermediate_size]
    activation: str

    def weights(self) -> Iterator[tuple[Weight, Weight, Weight]]:
        """Gate, up and down of each expert."""
        for gate_up, down in zip(self.gate_up, self.down, strict=True):
            yield *gate_up.chunk(2), down

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [num_tokens, hidden_size]; returns the same shape."""
        chosen, weights = self.router(hidden)
        activation = GATED_ACTIVATIONS[self.activation]
        return expert_mlp(hidden, self.gate_up, self.down, chosen, weights, activation)


@dataclass(frozen=True, slots=True)
class ListedExperts:
    """Experts in any weight format, one after another: the eager form of transformers."""

    router: Router
    experts: tuple[GatedMLP, ...]

    @property
    def activation(self) -> str:
        return self.experts[0].activation

    def weights(self) -> Iterator[tuple[Weight, Weight, Weight]]:
        """Gate, up and down of each expert."""
        for expert in self.experts:
            yield expert.gate.weight, expert.up.weight, expert.down.weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [num_tokens, hidden_size]; returns the same shape."""
        chosen, weights = self.router(hidden)
        output = torch.zeros_like(hidden)
        # Ascending: the order of the sums is part of the result.
        for idx in sorted(set(chosen.flatten().tolist())):
            token_idx, rank = torch.where(chosen == idx)
            states = self.experts[idx](hidden[token_idx]) * weights[token_idx, rank, None]
            output.index_add_(0, token_idx, states.to(output.dtype))
        return output


Experts = GroupedExperts | ListedExperts


def make_experts(router: Router, experts: Sequence[GatedMLP]) -> Experts:
    """The faster form that these weights allow."""
    gates, ups, downs = (
        [getattr(expert, name).weight for expert in experts] for name in ("gate", "up", "down")
    )
    if not all(_can_be_grouped(weight) for weight in (*gates, *ups, *downs)):
        return ListedExperts(router, tuple(experts))
    gate_up = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    return GroupedExperts(router, gate_up, torch.stack(downs), experts[0].activation)


def _can_be_grouped(weight: object) -> bool:
    return (
        isinstance(weight, torch.Tensor)
        and weight.shape[1] * weight.dtype.itemsize % GROUPED_ROW_BYTES == 0
    )
