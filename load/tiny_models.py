"""Tiny models of each family with random weights, made and written by transformers."""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A configuration class of transformers and what its config says beside small sizes."""

    config_class: str
    overrides: dict[str, Any] = field(default_factory=dict)


# Sliding and full layers in turn, with heads of another size each.
_GEMMA4: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_KEYS_AS_VALUES: dict[str, Any] = _GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}

# Windows are shorter than the prompts that are run, so that they matter.
TINY_MODELS: dict[str, TinyModel] = {
    "Llama": TinyModel("LlamaConfig"),
    "Llama 3 (scaled RoPE)": TinyModel(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "SmolLM2 (tied)": TinyModel("LlamaConfig", {"tie_word_embeddings": True}),
    "SmolLM3 (NoPE layers)": TinyModel("SmolLM3Config"),
    "SmolLM3 (sliding)": TinyModel(
        "SmolLM3Config", {"use_sliding_window": True, "sliding_window": 12}
    ),
    "Mistral (sliding)": TinyModel("MistralConfig", {"sliding_window": 12}),
    "Mistral (full)": TinyModel("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "Qwen 2.5": TinyModel("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen 2.5 (YaRN)": TinyModel(
        "Qwen2Config",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "Qwen 2 (sliding)": TinyModel(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}
    ),
    "Qwen 3": TinyModel("Qwen3Config", {"head_dim": 32}),
    "Gemma 3": TinyModel(
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
        },
    ),
    "Gemma 4 (E2B)": TinyModel(
        "Gemma4TextConfig",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
        },
    ),
    "Gemma 4 (E4B)": TinyModel(
        "Gemma4TextConfig",
        _GEMMA4 | {"hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2},
    ),
    "Gemma 4 (31B)": TinyModel("Gemma4TextConfig", _GEMMA4_KEYS_AS_VALUES),
    "Gemma 4 (26B-A4B)": TinyModel(
        "Gemma4TextConfig",
        _GEMMA4_KEYS_AS_VALUES
        | {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "Qwen3-MoE": TinyModel(
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "Mixtral": TinyModel("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def write_tiny_model(name: str, folder: Path, dtype: torch.dtype, **overrides: Any) -> Any:
    """Write a checkpoint of random weights, the same every time; returns transformers' model of it
    (attn_implementation sdpa, its default), loaded from there. ``overrides`` are of its config."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tiny = TINY_MODELS[name]
    config = getattr(transformers, tiny.config_class)(**_SIZES | tiny.overrides | overrides)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights of one and biases of zero would hide mistakes.
            kept = parameter if parameter.dim() == 1 else 0.0
            parameter.copy_(kept + 0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    model = aligned(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    assert model.config._attn_implementation == "sdpa"
    for tensor in (*model.parameters(), *model.buffers()):
        # Files are mapped: their tensors begin anywhere, and products may round otherwise there.
        tensor.data = tensor.data.clone()
    return model


def aligned(model: Any) -> Any:
    """A model of transformers with its weights in memory of torch's own.

    from_pretrained maps files, where tensors begin at any multiple of four bytes; a product of
    float32 may then take another path and round otherwise than from aligned memory.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model
