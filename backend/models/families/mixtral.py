"""Mixtral: Mistral with a mixture of experts in every layer. Its GGUF architecture is llama's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.backend.models import hf_config
from shoal.backend.models.config_values import or_default, required
from shoal.backend.models.family import Family
from shoal.backend.models.model_config import ExpertNames, ExpertsConfig, ModelConfig


def read_mixtral(config: Mapping[str, Any]) -> ModelConfig:
    """``MixtralForCausalLM``."""
    slides = config.get("sliding_window") is not None
    window = hf_config.sliding_window(config) if slides else None
    layers = hf_config.uniform_layers(config, window=window, theta=1000000.0)
    fields = hf_config.common_fields(config, max_positions=4096 * 32, eps=1e-5)
    return ModelConfig(
        "mixtral",
        **fields,
        layers=tuple(replace(layer, is_sparse=True) for layer in layers),
        activation=hf_config.activation(config),
        experts=ExpertsConfig(
            num_experts=required(config, "num_local_experts"),
            num_experts_per_token=or_default(config, "num_experts_per_tok", 2),
            intermediate_size=fields["intermediate_size"],
            float_weights=True,
            names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        ),
    )


MIXTRAL = Family("mixtral", hf={"MixtralForCausalLM": read_mixtral})
