"""The gated MLP of a mixture of experts: each token goes through the experts chosen for it."""

from collections.abc import Callable

import torch
from torch.nn import functional

# From gate and up projections, [rows, intermediate_size] each, to their activated product.
GatedActivation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def expert_mlp(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: GatedActivation,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs, [num_tokens, hidden_size] as ``hidden``.

    ``gate_up`` is [num_experts, 2 * intermediate_size, hidden_size], gate first; ``down``
    [num_experts, hidden_size, intermediate_size]; ``expert_ids`` int64 and ``expert_weights``
    [num_tokens, num_chosen]. Rows are grouped by expert, then one grouped product each way, as in
    transformers' default (``grouped_mm``), in its order of sums.
    A row must be a multiple of 16 bytes long.
    """
    num_tokens, num_chosen = expert_ids.shape
    sorted_ids, order = torch.sort(expert_ids.flatten())
    ends = torch.bincount(sorted_ids, minlength=len(gate_up)).cumsum(0, dtype=torch.int32)
    rows = hidden[order // num_chosen]
    gate, up = functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    outputs = functional.grouped_mm(activation(gate, up), down.transpose(1, 2), offs=ends)
    weighted = outputs * expert_weights.flatten()[order, None]
    restored = torch.empty_like(weighted)
    restored[order] = weighted
    return restored.view(num_tokens, num_chosen, -1).sum(dim=1).to(hidden.dtype)
