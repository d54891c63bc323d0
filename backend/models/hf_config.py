"""What the families read alike from ``config.json``."""

import math
from collections.abc import Mapping
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.config_values import (
    check_int,
    check_list,
    check_mapping,
    check_positive,
    or_default,
    required,
)
from shoal.backend.models.model_config import SIZE_LIMITS, LayerConfig, RopeConfig

SLIDING, FULL = "sliding_attention", "full_attention"
_ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def common_fields(
    config: Mapping[str, Any], *, max_positions: int, eps: float = 1e-6
) -> dict[str, Any]:
    """The fields of ModelConfig that all families name alike; ``layers`` is the family's own.

    ``max_positions`` and ``eps`` are the family's defaults in transformers.
    """
    return {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": _size(config, "hidden_size", "hidden_size"),
        "intermediate_size": required(config, "intermediate_size"),
        "num_heads": _size(config, "num_attention_heads", "num_heads"),
        "max_position_embeddings": or_default(config, "max_position_embeddings", max_positions),
        "rms_norm_eps": or_default(config, "rms_norm_eps", eps),
        "tie_word_embeddings": or_default(config, "tie_word_embeddings", False),
        "bos_token_id": config.get("bos_token_id"),
    }


def num_layers(config: Mapping[str, Any]) -> int:
    """The number of layers, in a range that a list can have."""
    return check_int(
        "num_hidden_layers", required(config, "num_hidden_layers"), 1, SIZE_LIMITS["num_layers"]
    )


def uniform_layers(
    config: Mapping[str, Any], *, window: int | None = None, theta: float = 10000.0
) -> tuple[LayerConfig, ...]:
    """Layers of one form. ``theta`` is the family's default."""
    return (layer_config(config, rope(config, theta), window),) * num_layers(config)


def layer_config(
    config: Mapping[str, Any],
    rope_config: RopeConfig | None,
    window: int | None = None,
    default_head_dim: int | None = None,
) -> LayerConfig:
    """A layer with the model's heads; their size defaults to hidden_size / heads."""
    heads = _size(config, "num_attention_heads", "num_heads")
    return LayerConfig(
        num_kv_heads=or_default(config, "num_key_value_heads", heads),
        head_dim=or_default(config, "head_dim", default_head_dim) or _head_dim(config, heads),
        rope=rope_config,
        window=window,
    )


def layer_types(config: Mapping[str, Any]) -> list[str] | None:
    """``layer_types`` where a config has them: SLIDING or FULL, one a layer."""
    if config.get("layer_types") is None:
        return None
    types = check_list("layer_types", config["layer_types"], num_layers(config))
    for value in types:
        if value not in (SLIDING, FULL):
            raise ConfigError(f"layer_types: {value!r} is not supported. Known: {SLIDING}, {FULL}.")
    return types


def sliding_window(config: Mapping[str, Any]) -> int:
    """The window of a config that has sliding layers."""
    return check_int(
        "sliding_window",
        required(config, "sliding_window"),
        1,
        SIZE_LIMITS["max_position_embeddings"],
    )


def activation(config: Mapping[str, Any], name: str = "hidden_act", default: str = "silu") -> str:
    """The gated MLP's activation by our own name."""
    value = or_default(config, name, default)
    if not isinstance(value, str) or value not in _ACTIVATION_NAMES:
        raise ConfigError(f"{name} must be one of {', '.join(_ACTIVATION_NAMES)}.")
    return _ACTIVATION_NAMES[value]


def refuse(config: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """Raise ConfigError when a setting that changes the model is on."""
    value = config.get(name)
    if value is not None and value not in allowed:
        raise ConfigError(f"{name} {value!r} is not supported.")


def token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids of all configs: a generation config often has more than the model config."""
    ids: set[int] = set()
    for config in configs:
        value = or_default(config, "eos_token_id", [])
        for token_id in value if isinstance(value, list) else [value]:
            ids.add(check_int("eos_token_id", token_id, 0, SIZE_LIMITS["vocab_size"]))
    return tuple(sorted(ids))


def rope(config: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
    """``rope_parameters`` of transformers 5, or the older rope_theta and rope_scaling."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    check_mapping("rope_parameters", values)
    theta = or_default(values, "rope_theta", or_default(config, "rope_theta", default_theta))
    max_positions = or_default(config, "max_position_embeddings", 2048)
    return rope_from(values, theta, max_positions)


def rope_from(values: Mapping[str, Any], theta: float, max_positions: int) -> RopeConfig:
    """One set of rope parameters."""
    check_mapping("rope_parameters", values)
    if or_default(values, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("rope partial_rotary_factor must be 1.")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if not isinstance(kind, str) or kind not in _ROPE_READERS:
        known = ", ".join(("default", *_ROPE_READERS))
        raise ConfigError(f"rope type {kind!r} is not supported. Supported: {known}.")
    original = or_default(values, "original_max_position_embeddings", max_positions)
    return _ROPE_READERS[kind](values, theta, original)


def _linear_rope(values: Mapping[str, Any], theta: float, original: int) -> RopeConfig:
    return RopeConfig(theta=theta, kind="linear", factor=required(values, "factor"))


def _llama3_rope(values: Mapping[str, Any], theta: float, original: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=required(values, "factor"),
        low_freq_factor=required(values, "low_freq_factor"),
        high_freq_factor=required(values, "high_freq_factor"),
        original_max_positions=original,
    )


def _yarn_rope(values: Mapping[str, Any], theta: float, original: int) -> RopeConfig:
    factor = check_positive("rope factor", required(values, "factor"))
    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_mscale(factor, 1.0)
        if mscale and mscale_all:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=values.get("beta_fast") or 32.0,
        beta_slow=values.get("beta_slow") or 1.0,
        truncate=or_default(values, "truncate", True),
        attention_factor=attention_factor,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * check_positive("mscale", mscale) * math.log(factor) + 1.0


_ROPE_READERS = {"linear": _linear_rope, "llama3": _llama3_rope, "yarn": _yarn_rope}


def _size(config: Mapping[str, Any], name: str, limit: str) -> int:
    return check_int(name, required(config, name), 1, SIZE_LIMITS[limit])


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    hidden_size = _size(config, "hidden_size", "hidden_size")
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})."
        )
    return hidden_size // num_heads
