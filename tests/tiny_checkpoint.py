"""A checkpoint folder with a tiny Llama of random weights, for tests that need a real model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shoal.backend.models.decoder import Decoder
from shoal.backend.models.registry import config_from_hf

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_checkpoint(folder: Path, **overrides: Any) -> Path:
    """Write config.json and model.safetensors; the same weights every time."""
    folder.mkdir(parents=True, exist_ok=True)
    values = TINY_CONFIG | overrides
    (folder / "config.json").write_text(json.dumps(values))
    generator = torch.Generator().manual_seed(0)
    shapes = Decoder.weight_shapes(config_from_hf(values))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tiny_windowed(folder: Path, window: int) -> Path:
    """A tiny Gemma 3: a sliding, a full and a sliding layer."""
    return write_tiny_checkpoint(
        folder,
        architectures=["Gemma3ForCausalLM"],
        head_dim=8,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=window,
        query_pre_attn_scalar=8,
    )
