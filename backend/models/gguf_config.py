"""What the families read alike from GGUF metadata."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.config_values import check_int, or_default, required
from shoal.backend.models.model_config import (
    SIZE_LIMITS,
    ExpertsConfig,
    LayerConfig,
    RopeConfig,
)


@dataclass(frozen=True, slots=True)
class GgufDescription:
    """Metadata of one file and the names of its tensors; what the first leaves out (biases, a head
    of its own), the second tell."""

    metadata: Mapping[str, Any]
    tensor_names: Collection[str]
    rope_factors: tuple[float, ...] = ()  # of the tensor rope_freqs.weight, where there is one

    @property
    def architecture(self) -> str:
        return str(required(self.metadata, "general.architecture"))

    def required(self, name: str) -> Any:
        """A value of the architecture's own. Raises ConfigError where it is missing."""
        return required(self.metadata, f"{self.architecture}.{name}")

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the architecture's own, or ``default``."""
        return or_default(self.metadata, f"{self.architecture}.{name}", default)

    def size(self, name: str, limit: str) -> int:
        """A whole number above 0."""
        return check_int(f"{self.architecture}.{name}", self.required(name), 1, SIZE_LIMITS[limit])


def common_fields(source: GgufDescription) -> dict[str, Any]:
    """The fields of ModelConfig that all families name alike; ``layers`` is the family's own."""
    names = source.tensor_names
    return {
        "vocab_size": _vocab_size(source),
        "hidden_size": source.size("embedding_length", "hidden_size"),
        "intermediate_size": source.required("feed_forward_length"),
        "num_heads": source.size("attention.head_count", "num_heads"),
        "max_position_embeddings": source.required("context_length"),
        "rms_norm_eps": source.required("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "output_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "qk_norm": "blk.0.attn_q_norm.weight" in names,
        "bos_token_id": source.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _eos(source.metadata),
    }


def num_layers(source: GgufDescription) -> int:
    """The number of layers, in a range that a list can have."""
    return source.size("block_count", "num_layers")


def layer_config(
    source: GgufDescription, rope_config: RopeConfig | None, window: int | None = None
) -> LayerConfig:
    """A layer with the model's heads."""
    num_heads = source.size("attention.head_count", "num_heads")
    return LayerConfig(
        num_kv_heads=source.get("attention.head_count_kv", num_heads),
        head_dim=_head_dim(source, num_heads),
        rope=rope_config,
        window=window,
    )


def uniform_layers(source: GgufDescription, window: int | None = None) -> tuple[LayerConfig, ...]:
    """Layers of one form."""
    return (layer_config(source, rope(source), window),) * num_layers(source)


def rope(source: GgufDescription) -> RopeConfig:
    """The rotary frequencies of a file that has one set."""
    theta = source.get("rope.freq_base", 10000.0)
    if source.rope_factors:
        return RopeConfig(theta=theta, kind="factors", factors=source.rope_factors)
    scaling = source.get("rope.scaling.type", "none")
    if scaling == "none":
        return RopeConfig(theta=theta)
    if scaling == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=source.required("rope.scaling.factor"))
    raise ConfigError(
        f"{source.architecture}.rope.scaling.type {scaling!r} is not supported. "
        "Supported: none, linear."
    )


def experts(source: GgufDescription) -> ExpertsConfig | None:
    """The experts of a file that has some."""
    if not source.get("expert_count"):
        return None
    return ExpertsConfig(
        num_experts=source.required("expert_count"),
        num_experts_per_token=source.required("expert_used_count"),
        intermediate_size=source.get(
            "expert_feed_forward_length", source.get("feed_forward_length")
        ),
    )


def _vocab_size(source: GgufDescription) -> Any:
    declared = source.get("vocab_size")
    if declared is not None:
        return declared
    return len(required(source.metadata, "tokenizer.ggml.tokens"))


def _head_dim(source: GgufDescription, num_heads: int) -> Any:
    hidden_size = source.size("embedding_length", "hidden_size")
    head_dim = source.get("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if source.get(name, head_dim) != head_dim:
            raise ConfigError(
                f"{source.architecture}.{name} must equal the head dimension, {head_dim}."
            )
    return head_dim


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    # End of turn and of message end a reply too, where a file tells them apart from end of text.
    names = ("eos", "eot", "eom")
    values = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return tuple(sorted({value for value in values if value is not None}))
