"""Checkpoints of every family as GGUF, in llama.cpp's layout: the very model of the safetensors."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from shoal.backend.weights.loader import load_model
from shoal.load.exactness import random_prompt
from shoal.load.paged_model import PagedModel
from shoal.load.tiny_models import write_tiny_model

# What the families have beside llama.cpp's usual names.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
TOPS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# By name in TINY_MODELS: GGUF's architecture. The last sizes of windows are fixed in llama.cpp.
ARCHITECTURES = {
    "Llama": "llama",
    "SmolLM3 (NoPE layers)": "smollm3",
    "Qwen 2.5": "qwen2",
    "Qwen 3": "qwen3",
    "Gemma 3": "gemma3",
    "Mixtral": "llama",
}
PERMUTED = ("llama", "smollm3")


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows so that rotated pairs lie side by side, as llama.cpp stores them."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, path: Path, architecture: str) -> None:
    """Rewrite a checkpoint folder as one GGUF file in F32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        if architecture == "gemma3" and stem.endswith("norm"):
            weight = weight + 1
        if architecture in PERMUTED and stem.endswith(("q_proj", "k_proj")):
            which = "attention" if stem.endswith("q_proj") else "key_value"
            weight = permute(weight, config[f"num_{which}_heads"])
        if stem in TOPS:
            writer.add_tensor(f"{TOPS[stem]}.{suffix}", weight)
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        if ".experts." in part:
            _, idx, kind = part.rsplit(".", 2)
            experts.setdefault(f"blk.{layer}.{EXPERT_NAMES[kind]}.{suffix}", {})[int(idx)] = weight
            continue
        names = LAYER_NAMES | (GEMMA_NAMES if architecture == "gemma3" else {})
        writer.add_tensor(f"blk.{layer}.{names[part]}.{suffix}", weight)
    for name, parts in experts.items():
        writer.add_tensor(name, np.stack([parts[idx] for idx in sorted(parts)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("num_local_experts"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_token_list([f"t{idx}" for idx in range(config["vocab_size"])])


def logits(path: Path) -> torch.Tensor:
    loaded = load_model(path, torch.float32)
    paged = PagedModel(loaded.model, loaded.config, torch.float32, 1, 32)
    return paged.step([paged.add(random_prompt(30))], all_rows=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    overrides: dict[str, Any] = {}
    if name == "Gemma 3":  # every sixth layer is full, and the head scales the scores
        overrides = {
            "sliding_window_pattern": 6,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 32,
        }
    write_tiny_model(name, tmp_path / "folder", torch.float32, **overrides)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path / "folder", path, ARCHITECTURES[name])
    assert torch.equal(logits(path), logits(tmp_path / "folder"))


def test_qwen3_moe_from_gguf(tmp_path: Path) -> None:
    """GGUF says of all layers that they are sparse."""
    write_tiny_model(
        "Qwen3-MoE", tmp_path / "folder", torch.float32, mlp_only_layers=[], norm_topk_prob=True
    )
    write_gguf(tmp_path / "folder", tmp_path / "model.gguf", "qwen3moe")
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(tmp_path / "folder"))
