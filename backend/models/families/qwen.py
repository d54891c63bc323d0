"""Qwen 2 and 2.5 (biases on Q, K and V), Qwen 3 (QK-norm) and its mixture of experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models import gguf_config, hf_config
from shoal.backend.models.config_values import check_int, or_default, required
from shoal.backend.models.family import Family, GgufForm
from shoal.backend.models.gguf_config import GgufDescription
from shoal.backend.models.model_config import ExpertsConfig, LayerConfig, ModelConfig


def read_qwen2(config: Mapping[str, Any]) -> ModelConfig:
    """``Qwen2ForCausalLM``, which Qwen 2.5 is too."""
    return ModelConfig(
        "qwen2",
        **hf_config.common_fields(config, max_positions=32768),
        layers=_layers(config, None),
        activation=hf_config.activation(config),
        attention_bias=True,
    )


def read_qwen3(config: Mapping[str, Any]) -> ModelConfig:
    """``Qwen3ForCausalLM``."""
    bias = or_default(config, "attention_bias", False)
    return ModelConfig(
        "qwen3",
        **hf_config.common_fields(config, max_positions=32768),
        layers=_layers(config, 128),
        activation=hf_config.activation(config),
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def read_qwen3_moe(config: Mapping[str, Any]) -> ModelConfig:
    """``Qwen3MoeForCausalLM``."""
    slides = or_default(config, "use_sliding_window", False) and config.get("sliding_window")
    window = hf_config.sliding_window(config) if slides else None
    layer = hf_config.uniform_layers(config, window=window)[0]
    bias = or_default(config, "attention_bias", False)
    return ModelConfig(
        "qwen3_moe",
        **hf_config.common_fields(config, max_positions=32768),
        layers=tuple(
            replace(layer, is_sparse=_is_sparse(config, idx))
            for idx in range(hf_config.num_layers(config))
        ),
        activation=hf_config.activation(config),
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=ExpertsConfig(
            # Written under either name, by the version of transformers.
            num_experts=required(
                config, "num_local_experts" if "num_experts" not in config else "num_experts"
            ),
            num_experts_per_token=required(config, "num_experts_per_tok"),
            intermediate_size=required(config, "moe_intermediate_size"),
            normalize=or_default(config, "norm_topk_prob", False),
        ),
    )


def _layers(config: Mapping[str, Any], head_dim: int | None) -> tuple[LayerConfig, ...]:
    """Full attention, unless a window is switched on: then it slides in the upper layers."""
    count = hf_config.num_layers(config)
    full = hf_config.layer_config(config, hf_config.rope(config), None, head_dim)
    if not or_default(config, "use_sliding_window", False) or not config.get("sliding_window"):
        return (full,) * count
    sliding = replace(full, window=hf_config.sliding_window(config))
    types = hf_config.layer_types(config)
    if types is not None:
        return tuple(sliding if kind == hf_config.SLIDING else full for kind in types)
    num_full = check_int("max_window_layers", or_default(config, "max_window_layers", 28), 0, 4096)
    return tuple(sliding if idx >= num_full else full for idx in range(count))


def _is_sparse(config: Mapping[str, Any], idx: int) -> bool:
    step = check_int("decoder_sparse_step", or_default(config, "decoder_sparse_step", 1), 1, 4096)
    dense = or_default(config, "mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ConfigError("mlp_only_layers must be a list of layers.")
    return idx not in dense and (idx + 1) % step == 0


def read_qwen_gguf(source: GgufDescription) -> ModelConfig:
    """Architectures ``qwen2`` and ``qwen3``; biases and QK-norm show in the tensors."""
    return ModelConfig(
        source.architecture,
        **gguf_config.common_fields(source),
        layers=gguf_config.uniform_layers(source),
    )


def read_qwen3_moe_gguf(source: GgufDescription) -> ModelConfig:
    """Architecture ``qwen3moe``."""
    experts = gguf_config.experts(source)
    layer = replace(gguf_config.uniform_layers(source)[0], is_sparse=experts is not None)
    return ModelConfig(
        "qwen3_moe",
        **gguf_config.common_fields(source),
        layers=(layer,) * gguf_config.num_layers(source),
        experts=experts,
    )


QWEN2 = Family(
    "qwen2", hf={"Qwen2ForCausalLM": read_qwen2}, gguf={"qwen2": GgufForm(read_qwen_gguf)}
)
QWEN3 = Family(
    "qwen3", hf={"Qwen3ForCausalLM": read_qwen3}, gguf={"qwen3": GgufForm(read_qwen_gguf)}
)
QWEN3_MOE = Family(
    "qwen3_moe",
    hf={"Qwen3MoeForCausalLM": read_qwen3_moe},
    gguf={"qwen3moe": GgufForm(read_qwen3_moe_gguf)},
)
