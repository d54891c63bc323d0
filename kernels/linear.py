"""Matrix product with a weight stored as [out_features, in_features]."""

import torch
from torch.nn import functional

from shoal.kernels.quantized_weights import QuantizedWeight, Weight


def linear(states: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``states @ weight.T + bias``: [num_tokens, in_features] to [num_tokens, out_features].

    torch promises no more than closeness between the rows of one product and the same rows in a
    product of another height; exact equality with transformers holds for equal heights.
    """
    if isinstance(weight, QuantizedWeight):
        return weight.linear(states, bias)
    return functional.linear(states, weight, bias)
