"""Llama 2 and 3, SmolLM2, SmolLM3 (some layers know no positions) and Mistral (sliding window)."""

from collections.abc import Mapping
from typing import Any

from shoal.backend.models import gguf_config, hf_config
from shoal.backend.models.config_values import check_int, check_list, or_default
from shoal.backend.models.family import Family, GgufForm
from shoal.backend.models.gguf_config import GgufDescription
from shoal.backend.models.model_config import LayerConfig, ModelConfig


def read_llama(config: Mapping[str, Any]) -> ModelConfig:
    """``LlamaForCausalLM``."""
    bias = or_default(config, "attention_bias", False)
    return ModelConfig(
        "llama",
        **hf_config.common_fields(config, max_positions=2048),
        layers=hf_config.uniform_layers(config),
        activation=hf_config.activation(config),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=or_default(config, "mlp_bias", False),
    )


def read_smollm3(config: Mapping[str, Any]) -> ModelConfig:
    """``SmolLM3ForCausalLM``: every fourth layer has no rotation."""
    count = hf_config.num_layers(config)
    interval = or_default(config, "no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")
    if rotates is None:
        check_int("no_rope_layer_interval", interval, 1, 4096)
        rotates = [(idx + 1) % interval != 0 for idx in range(count)]
    types = hf_config.layer_types(config)
    bias = or_default(config, "attention_bias", False)
    fields = hf_config.common_fields(config, max_positions=32768)
    fields["tie_word_embeddings"] = or_default(config, "tie_word_embeddings", True)
    return ModelConfig(
        "smollm3",
        **fields,
        layers=tuple(
            _smollm3_layer(config, bool(rotated), types[idx] if types else None)
            for idx, rotated in enumerate(check_list("no_rope_layers", rotates, count))
        ),
        activation=hf_config.activation(config),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=or_default(config, "mlp_bias", False),
    )


def _smollm3_layer(config: Mapping[str, Any], rotated: bool, kind: str | None) -> LayerConfig:
    slides = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    slides = slides and (kind == hf_config.SLIDING if kind else not rotated)
    return hf_config.layer_config(
        config,
        hf_config.rope(config, default_theta=2000000.0) if rotated else None,
        hf_config.sliding_window(config) if slides else None,
    )


def read_mistral(config: Mapping[str, Any]) -> ModelConfig:
    """``MistralForCausalLM``; a config without a window means the one of the first Mistral."""
    slides = config.get("sliding_window", 4096) is not None
    window = hf_config.sliding_window({"sliding_window": 4096} | dict(config)) if slides else None
    return ModelConfig(
        "mistral",
        **hf_config.common_fields(config, max_positions=4096 * 32),
        layers=hf_config.uniform_layers(config, window=window),
        activation=hf_config.activation(config),
    )


def read_llama_gguf(source: GgufDescription) -> ModelConfig:
    """Architecture ``llama``: Llama, SmolLM2, Mistral, and Mixtral with its experts."""
    experts = gguf_config.experts(source)
    layer = gguf_config.uniform_layers(source)[0]
    if experts:
        layer = LayerConfig(layer.num_kv_heads, layer.head_dim, layer.rope, is_sparse=True)
    return ModelConfig(
        "mixtral" if experts else "llama",
        **gguf_config.common_fields(source),
        layers=(layer,) * gguf_config.num_layers(source),
        experts=experts,
    )


def read_smollm3_gguf(source: GgufDescription) -> ModelConfig:
    """Architecture ``smollm3``."""
    rope = gguf_config.rope(source)
    return ModelConfig(
        "smollm3",
        **gguf_config.common_fields(source),
        layers=tuple(
            gguf_config.layer_config(source, rope if (idx + 1) % 4 else None)
            for idx in range(gguf_config.num_layers(source))
        ),
    )


LLAMA = Family(
    "llama",
    hf={"LlamaForCausalLM": read_llama},
    gguf={"llama": GgufForm(read_llama_gguf, pairs_are_neighbours=True)},
)
SMOLLM3 = Family(
    "smollm3",
    hf={"SmolLM3ForCausalLM": read_smollm3},
    gguf={"smollm3": GgufForm(read_smollm3_gguf, pairs_are_neighbours=True)},
)
MISTRAL = Family("mistral", hf={"MistralForCausalLM": read_mistral})
