"""The gated activation of Gemma's MLP."""

import torch
from torch.nn import functional


def gelu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh form of GELU, both [num_tokens, intermediate_size].

    As Gemma3MLP of transformers.
    """
    return functional.gelu(gate, approximate="tanh") * up
