"""Token embedding."""

import torch
from torch.nn import functional

from shoal.kernels.quantized_weights import QuantizedWeight, Weight


def embedding(input_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Rows of ``weight`` [vocab_size, hidden_size] for ``input_ids`` int64 [num_tokens]."""
    if isinstance(weight, QuantizedWeight):
        return weight.rows(input_ids)
    return functional.embedding(input_ids, weight)
