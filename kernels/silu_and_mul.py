"""The gated activation of the Llama MLP."""

import torch
from torch.nn import functional


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, both [num_tokens, intermediate_size]. As LlamaMLP of transformers."""
    return functional.silu(gate) * up
