"""The mixture of experts equals transformers' default bit for bit."""

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextConfig, Gemma4TextExperts

from shoal.kernels.expert_mlp import expert_mlp


def gelu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") * up


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.inference_mode()
def test_equals_transformers(dtype: torch.dtype, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    config = Gemma4TextConfig(hidden_size=24, moe_intermediate_size=40, num_experts=6)
    config._experts_implementation = "grouped_mm"
    theirs = Gemma4TextExperts(config).to(dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(num_tokens, 24, dtype=dtype)
    weights, ids = torch.rand(num_tokens, 6).topk(2)
    output = expert_mlp(hidden, theirs.gate_up_proj, theirs.down_proj, ids, weights, gelu_and_mul)
    assert output.dtype == dtype
    assert torch.equal(output, theirs(hidden, ids, weights))


def test_formula() -> None:
    torch.manual_seed(0)
    hidden, gate_up, down = torch.randn(5, 8), torch.randn(3, 24, 8), torch.randn(3, 8, 12)
    weights, ids = torch.rand(5, 3).topk(2)
    output = expert_mlp(hidden, gate_up, down, ids, weights, gelu_and_mul)
    expected = torch.zeros(5, 8)
    for token in range(5):
        for choice in range(2):
            expert = int(ids[token, choice])
            gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
            expected[token] += weights[token, choice] * (down[expert] @ gelu_and_mul(gate, up))
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
