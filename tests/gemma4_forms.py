"""The forms that Gemma 4 comes in, small."""

from typing import Any

import torch

WINDOW = 8
SMALL = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
}
# Full layers have fewer and wider heads, whose values are their keys.
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    # As E2B: per-layer embeddings, shared keys and values, and there MLPs of twice the width.
    "e2b": {
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
    },
    "e4b": {"hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2},
    "31b": KEYS_AS_VALUES,
    "26b_a4b": KEYS_AS_VALUES
    | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "wide_heads": {"global_head_dim": 512},
    "untied": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "final_logit_softcapping": None,
    },
}


def fill(model: torch.nn.Module) -> None:
    """Norms and scalars of one and biases of zero would hide mistakes."""
    torch.manual_seed(0)
    for name, tensor in model.state_dict().items():
        torch.nn.init.normal_(tensor, mean=0.05, std=0.2)
        if "norm" in name or "scal" in name:
            tensor += 0.9
