"""Gemma 3: QK-norm, sliding and full layers with a RoPE base each, norms around both halves.

Source: the Gemma 3 technical report (arXiv:2503.19786) and transformers' Gemma3TextConfig.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models import gguf_config, hf_config
from shoal.backend.models.config_values import (
    check_int,
    check_mapping,
    check_positive,
    or_default,
    required,
)
from shoal.backend.models.family import Family, GgufForm
from shoal.backend.models.gguf_config import GgufDescription
from shoal.backend.models.model_config import SIZE_LIMITS, LayerConfig, ModelConfig, RopeConfig

GLOBAL_THETA, LOCAL_THETA = 1000000.0, 10000.0


def read_gemma3(config: Mapping[str, Any]) -> ModelConfig:
    """``Gemma3ForCausalLM``."""
    for name in ("use_bidirectional_attention", "attn_logit_softcapping"):
        hf_config.refuse(config, name, False)
    hf_config.refuse(config, "final_logit_softcapping")
    fields = hf_config.common_fields(config, max_positions=131072)
    fields["tie_word_embeddings"] = or_default(config, "tie_word_embeddings", True)
    bias = or_default(config, "attention_bias", False)
    scalar = check_positive("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256))
    return ModelConfig(
        "gemma3",
        **fields,
        layers=_hf_layers(config),
        activation=hf_config.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        attention_bias=bias,
        output_bias=bias,
        attention_scale=scalar**-0.5,
        **_fixed(fields["hidden_size"]),
    )


# What Gemma3TextConfig has where a checkpoint's nested config leaves it out.
_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}


def read_gemma3_multimodal(config: Mapping[str, Any]) -> ModelConfig:
    """``Gemma3ForConditionalGeneration``: its text model, nested as ``text_config``."""
    text = required(config, "text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("text_config must hold a mapping.")
    tied = or_default(config, "tie_word_embeddings", or_default(text, "tie_word_embeddings", True))
    read = read_gemma3(_TEXT_DEFAULTS | dict(text) | {"tie_word_embeddings": tied})
    read = replace(read, weight_prefix="language_model.model.")
    if config.get("vision_config") is None:
        return read
    token_id = or_default(
        config, "image_token_index", or_default(config, "image_token_id", 262_144)
    )
    check_int("image_token_index", token_id, 0, SIZE_LIMITS["vocab_size"])
    return replace(read, image_token_id=token_id)


def _fixed(hidden_size: int) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "sandwich_norms": True,
        "unit_offset_norms": True,
        "embedding_scale": hidden_size**0.5,
    }


def _hf_layers(config: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    types = hf_config.layer_types(config)
    if types is None:
        pattern = check_int(
            "sliding_window_pattern", config.get("sliding_window_pattern", 6), 1, 4096
        )
        types = [
            hf_config.SLIDING if (idx + 1) % pattern else hf_config.FULL
            for idx in range(hf_config.num_layers(config))
        ]
    full, local = _ropes(config)
    window = hf_config.sliding_window(config) if hf_config.SLIDING in types else None
    return tuple(
        hf_config.layer_config(config, local, window, 256)
        if kind == hf_config.SLIDING
        else hf_config.layer_config(config, full, None, 256)
        for kind in types
    )


def _ropes(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Of the full layers, and of the sliding ones."""
    max_positions = or_default(config, "max_position_embeddings", 131072)
    nested = config.get("rope_parameters")
    if nested is not None:  # transformers 5
        check_mapping("rope_parameters", nested)
        full = check_mapping("rope_parameters", or_default(nested, hf_config.FULL, {}))
        local = check_mapping("rope_parameters", or_default(nested, hf_config.SLIDING, {}))
    else:
        scaling = check_mapping("rope_scaling", or_default(config, "rope_scaling", {}))
        full = dict(scaling) | _theta(config, "rope_theta")
        local = _theta(config, "rope_local_base_freq")
    return (
        hf_config.rope_from(full, or_default(full, "rope_theta", GLOBAL_THETA), max_positions),
        hf_config.rope_from(local, or_default(local, "rope_theta", LOCAL_THETA), max_positions),
    )


def _theta(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"rope_theta": config[name]} if config.get(name) is not None else {}


def read_gemma3_gguf(source: GgufDescription) -> ModelConfig:
    """Architecture ``gemma3``: every sixth layer is full, as llama.cpp fixes it too."""
    fields = gguf_config.common_fields(source)
    rope = gguf_config.rope(source)
    local = RopeConfig(theta=LOCAL_THETA)
    window = source.required("attention.sliding_window")
    layers = tuple(
        gguf_config.layer_config(source, local, window)
        if (idx + 1) % 6
        else gguf_config.layer_config(source, rope)
        for idx in range(gguf_config.num_layers(source))
    )
    num_heads, hidden_size = fields["num_heads"], fields["hidden_size"]
    # Of the sizes of Gemma 3 only the 27B one scales scores by another number than its head's.
    is_27b = len(layers) == 62
    return ModelConfig(
        "gemma3",
        **{name: value for name, value in fields.items() if name != "qk_norm"},
        layers=layers,
        activation="gelu_tanh",
        attention_scale=(hidden_size // num_heads) ** -0.5 if is_27b else None,
        **_fixed(hidden_size),
    )


GEMMA3 = Family(
    "gemma3",
    hf={
        "Gemma3ForCausalLM": read_gemma3,
        "Gemma3ForConditionalGeneration": read_gemma3_multimodal,
    },
    gguf={
        "gemma3": GgufForm(
            read_gemma3_gguf,
            layer_names={
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            },
            norms_add_one=True,
        )
    },
)
