"""A mixture of experts in place of an MLP: each token goes through a few of many gated MLPs."""

from dataclasses import dataclass

import torch

from shoal.backend.models.layers import GatedMLP, Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """As Qwen3MoeSparseMoeBlock and MixtralSparseMoeBlock of transformers (their eager form)."""

    router: Linear
    experts: tuple[GatedMLP, ...]
    num_per_token: int
    normalize: bool
    float_weights: bool

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [num_tokens, hidden_size]; returns the same shape."""
        weights, chosen = self._route(hidden)
        output = torch.zeros_like(hidden)
        for idx in sorted(
            set(chosen.flatten().tolist())
        ):  # ascending: the order of the sums is part of it
            token_idx, rank = torch.where(chosen == idx)
            states = self.experts[idx](hidden[token_idx]) * weights[token_idx, rank, None]
            output.index_add_(0, token_idx, states.to(output.dtype))
        return output

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and indices of each token's experts, [num_tokens, num_per_token] each."""
        logits = self.router(hidden)
        scores = torch.softmax(logits.float(), dim=-1)
        weights, chosen = torch.topk(scores, self.num_per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights if self.float_weights else weights.to(logits.dtype), chosen
