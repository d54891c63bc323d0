"""Token embedding."""

import torch
from torch.nn import functional


def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of ``weight`` [vocab_size, hidden_size] for ``input_ids`` int64 [num_tokens]."""
    return functional.embedding(input_ids, weight)
