"""Gemma 4, text: E2B and E4B, the dense models, and the one with experts.

Source: transformers' Gemma4TextConfig and its documentation of per-layer embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models import hf_config
from shoal.backend.models.config_values import check_int, check_positive, or_default, required
from shoal.backend.models.family import Family
from shoal.backend.models.gemma4_config import (
    Gemma4Config,
    Gemma4Experts,
    Gemma4Layer,
    Gemma4Rope,
)
from shoal.backend.models.hf_config import FULL, SLIDING
from shoal.backend.models.model_config import SIZE_LIMITS

_DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def read_gemma4(config: Mapping[str, Any]) -> Gemma4Config:
    """``Gemma4ForCausalLM``: the text model alone."""
    return _read_text(config, "model.")


def read_gemma4_multimodal(config: Mapping[str, Any]) -> Gemma4Config:
    """``Gemma4ForConditionalGeneration``: its text model, nested as ``text_config``."""
    text = required(config, "text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("text_config must hold a mapping.")
    tied = or_default(config, "tie_word_embeddings", text.get("tie_word_embeddings"))
    read = _read_text(dict(text) | {"tie_word_embeddings": tied}, "model.language_model.")
    if config.get("vision_config") is None:
        return read
    image_token_id = or_default(config, "image_token_id", 258_880)
    check_int("image_token_id", image_token_id, 0, SIZE_LIMITS["vocab_size"])
    return replace(read, image_token_id=image_token_id)


def _read_text(config: Mapping[str, Any], weight_prefix: str) -> Gemma4Config:
    if config.get("use_bidirectional_attention") == "all":
        raise ConfigError("use_bidirectional_attention 'all' is not supported: it is no decoder.")
    if or_default(config, "hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ConfigError("hidden_activation must be gelu_pytorch_tanh.")
    per_layer_size = or_default(config, "hidden_size_per_layer_input", 256)
    return Gemma4Config(
        vocab_size=or_default(config, "vocab_size", 262_144),
        hidden_size=required(config, "hidden_size"),
        num_heads=required(config, "num_attention_heads"),
        layers=_read_layers(config),
        max_position_embeddings=or_default(config, "max_position_embeddings", 131_072),
        rms_norm_eps=or_default(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=or_default(config, "tie_word_embeddings", True),
        attention_bias=or_default(config, "attention_bias", False),
        final_softcap=config.get("final_logit_softcapping"),
        per_layer_size=per_layer_size,
        per_layer_vocab_size=or_default(config, "vocab_size_per_layer_input", 262_144),
        experts=_read_experts(config),
        pad_token_id=or_default(config, "pad_token_id", 0),
        images_attend_both_ways=config.get("use_bidirectional_attention") == "vision",
        weight_prefix=weight_prefix,
        bos_token_id=config.get("bos_token_id"),
    )


def _read_layers(config: Mapping[str, Any]) -> tuple[Gemma4Layer, ...]:
    count = hf_config.num_layers(config)
    types = _layer_types(config, count)
    shared_with = _shared_layers(config, types)
    ropes = {kind: _read_rope(config, kind) for kind in set(types)}
    heads = [_read_heads(config, idx, kind) for idx, kind in enumerate(types)]
    inner = check_int(
        "intermediate_size",
        required(config, "intermediate_size"),
        1,
        SIZE_LIMITS["intermediate_size"],
    )
    double_wide = or_default(config, "use_double_wide_mlp", False)
    window = hf_config.sliding_window({"sliding_window": 512} | dict(config))
    keys_only = or_default(config, "attention_k_eq_v", False)
    return tuple(
        Gemma4Layer(
            *heads[idx],
            rope=ropes[kind],
            intermediate_size=inner * 2 if double_wide and shared_with[idx] is not None else inner,
            window=window if kind == SLIDING else None,
            shared_with=shared_with[idx],
            values_are_keys=bool(keys_only) and kind == FULL,
        )
        for idx, kind in enumerate(types)
    )


def _layer_types(config: Mapping[str, Any], count: int) -> list[str]:
    types = hf_config.layer_types(config)
    if types is None:
        types = [SLIDING if (idx + 1) % 6 else FULL for idx in range(count)]
    return [*types[:-1], FULL]  # the last layer sees everything, whatever the config says


def _shared_layers(config: Mapping[str, Any], types: list[str]) -> list[int | None]:
    """For each layer: the earlier one of its kind whose keys and values it reads, if any."""
    count = len(types)
    num_shared = or_default(config, "num_kv_shared_layers", 0)
    check_int("num_kv_shared_layers", num_shared, 0, count - 1)
    first_shared = count - num_shared
    last_own = {kind: idx for idx, kind in enumerate(types[:first_shared])}
    for kind in types[first_shared:]:
        if kind not in last_own:
            raise ConfigError(
                f"num_kv_shared_layers ({num_shared}): no layer of type {kind} keeps keys."
            )
    return [None if idx < first_shared else last_own[kind] for idx, kind in enumerate(types)]


def _read_heads(config: Mapping[str, Any], idx: int, kind: str) -> tuple[Any, Any]:
    """Key/value heads and head size of a layer; newer configs give what differs layer by layer."""
    values: dict[str, Any] = {
        "num_key_value_heads": required(config, "num_key_value_heads"),
        "head_dim": or_default(config, "head_dim", 256),
    }
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        if not isinstance(by_layer, Mapping):
            raise ConfigError("per_layer_config must hold a mapping.")
        own = or_default(by_layer, str(idx), {})
        if not isinstance(own, Mapping) or not own.keys() <= values.keys():
            raise ConfigError(f"per_layer_config: {', '.join(values)} can differ between layers.")
        values |= own
    elif kind == FULL:
        values["head_dim"] = or_default(config, "global_head_dim", 512)
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            values["num_key_value_heads"] = config["num_global_key_value_heads"]
    return values["num_key_value_heads"], values["head_dim"]


def _read_rope(config: Mapping[str, Any], kind: str) -> Gemma4Rope:
    ropes = or_default(config, "rope_parameters", _DEFAULT_ROPES)
    values = ropes.get(kind) if isinstance(ropes, Mapping) else None
    if not isinstance(values, Mapping):
        raise ConfigError(f"rope_parameters must hold a mapping for {kind}.")
    rope_type = values.get("rope_type", "default")
    theta = check_positive("rope_theta", required(values, "rope_theta"))
    if rope_type == "default":
        return Gemma4Rope(theta)
    if rope_type != "proportional":
        raise ConfigError(
            f"rope type {rope_type!r} is not supported. Supported: default, proportional."
        )
    rotated = check_positive(
        "partial_rotary_factor", or_default(values, "partial_rotary_factor", 1.0)
    )
    if rotated > 1:
        raise ConfigError("partial_rotary_factor must be at most 1.")
    factor = check_positive("rope factor", or_default(values, "factor", 1.0))
    return Gemma4Rope(theta, rotated, factor)


def _read_experts(config: Mapping[str, Any]) -> Gemma4Experts | None:
    if not config.get("enable_moe_block"):
        return None
    return Gemma4Experts(
        required(config, "num_experts"),
        required(config, "top_k_experts"),
        required(config, "moe_intermediate_size"),
    )


GEMMA4 = Family(
    "gemma4",
    hf={
        "Gemma4ForCausalLM": read_gemma4,
        "Gemma4ForConditionalGeneration": read_gemma4_multimodal,
    },
)
