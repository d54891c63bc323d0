"""The shape of a model, read from ``config.json`` or GGUF metadata and checked; without torch."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.kv_layout import KVLayout

HF_ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: theta ** (-2i / head_dim), then scaled according to ``kind``.

    linear divides them all by ``factor``; llama3 divides the long wavelengths and blends between
    ``low_freq_factor`` and ``high_freq_factor``; factors divides each by its own number (GGUF's
    precomputed form of llama3).
    """

    theta: float = 10000.0
    kind: str = "default"  # default, linear, llama3 or factors
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()  # [head_dim / 2] of kind factors


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a Llama-family model. Raises ConfigError, naming the field."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, high in _SIZES.items():
            _check_int(name, getattr(self, name), 1, high)
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim ({self.head_dim}) must be even.")
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        _check_rope(self.rope, self.head_dim)
        if self.bos_token_id is not None:
            _check_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        for token_id in self.eos_token_ids:
            _check_int("eos_token_id", token_id, 0, self.vocab_size - 1)

    @property
    def kv_layout(self) -> KVLayout:
        """The keys and values that the model's layers keep."""
        return KVLayout.uniform(self.num_layers, self.num_kv_heads, self.head_dim)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read a decoded ``config.json``; EOS ids come from ``generation_config.json`` as well."""
        _check_hf_architecture(config)
        hidden_size = _required(config, "hidden_size")
        num_heads = _required(config, "num_attention_heads")
        _check_int("hidden_size", hidden_size, 1, _SIZES["hidden_size"])
        _check_int("num_attention_heads", num_heads, 1, _SIZES["num_heads"])
        return cls(
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_or_default(config, "num_key_value_heads", num_heads),
            head_dim=_hf_head_dim(config, hidden_size, num_heads),
            max_position_embeddings=_or_default(config, "max_position_embeddings", 2048),
            rms_norm_eps=_or_default(config, "rms_norm_eps", 1e-6),
            rope=_hf_rope(config),
            tie_word_embeddings=_or_default(config, "tie_word_embeddings", False),
            attention_bias=_or_default(config, "attention_bias", False),
            mlp_bias=_or_default(config, "mlp_bias", False),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids(config, generation_config or {}),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        rope_factors: tuple[float, ...] = (),
    ) -> "ModelConfig":
        """Read GGUF metadata. What it leaves out (biases, a head of its own) the tensors tell.

        ``rope_factors`` are the values of the tensor rope_freqs.weight where the file has one.
        """
        _check_gguf_architecture(metadata)
        num_heads = _required(metadata, "llama.attention.head_count")
        hidden_size = _required(metadata, "llama.embedding_length")
        _check_int("llama.attention.head_count", num_heads, 1, _SIZES["num_heads"])
        _check_int("llama.embedding_length", hidden_size, 1, _SIZES["hidden_size"])
        return cls(
            vocab_size=_gguf_vocab_size(metadata),
            hidden_size=hidden_size,
            intermediate_size=_required(metadata, "llama.feed_forward_length"),
            num_layers=_required(metadata, "llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=_or_default(metadata, "llama.attention.head_count_kv", num_heads),
            head_dim=_gguf_head_dim(metadata, hidden_size, num_heads),
            max_position_embeddings=_required(metadata, "llama.context_length"),
            rms_norm_eps=_required(metadata, "llama.attention.layer_norm_rms_epsilon"),
            rope=_gguf_rope(metadata, rope_factors),
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_gguf_eos(metadata),
        )


# Upper limits: far above any real model, low enough that no product of them overflows.
_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_layers": 4096,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 2**26,
}


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number in [{low}, {high}].")


def _check_positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not value > 0:
        raise ConfigError(f"{name} must be a number above 0.")


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
        _check_positive(f"rope {name}", getattr(rope, name))
    _check_int(
        "rope original_max_position_embeddings",
        rope.original_max_positions,
        1,
        _SIZES["max_position_embeddings"],
    )
    if rope.kind == "llama3" and not rope.high_freq_factor > rope.low_freq_factor:
        raise ConfigError("rope high_freq_factor must be above low_freq_factor.")
    if rope.kind == "factors":
        if len(rope.factors) != head_dim // 2:
            raise ConfigError(f"rope_freqs.weight must hold {head_dim // 2} numbers.")
        for value in rope.factors:
            _check_positive("rope_freqs.weight", value)


def _required(values: Mapping[str, Any], name: str) -> Any:
    value = values.get(name)
    if value is None:
        raise ConfigError(f"{name} is missing.")
    return value


def _or_default(values: Mapping[str, Any], name: str, default: Any) -> Any:
    value = values.get(name)
    return default if value is None else value


def _check_hf_architecture(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures")
    known = ", ".join(HF_ARCHITECTURES)
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"architectures is missing. Supported: {known}.")
    if architectures[0] not in HF_ARCHITECTURES:
        raise ConfigError(
            f"architecture {architectures[0]!r} is not supported. Supported: {known}."
        )
    if config.get("quantization_config") is not None:
        raise ConfigError("quantization_config: quantised safetensors are not supported; use GGUF.")
    if _or_default(config, "hidden_act", "silu") != "silu":
        raise ConfigError("hidden_act must be silu.")


def _hf_head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> Any:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})."
        )
    return hidden_size // num_heads


def _hf_rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters; before it there were rope_theta and rope_scaling.
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise ConfigError("rope_parameters must hold a mapping.")
    theta = _or_default(values, "rope_theta", _or_default(config, "rope_theta", 10000.0))
    if _or_default(values, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("rope partial_rotary_factor must be 1.")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_required(values, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_required(values, "factor"),
            low_freq_factor=_required(values, "low_freq_factor"),
            high_freq_factor=_required(values, "high_freq_factor"),
            original_max_positions=_or_default(
                values,
                "original_max_position_embeddings",
                _or_default(config, "max_position_embeddings", 2048),
            ),
        )
    raise ConfigError(f"rope type {kind!r} is not supported. Supported: default, linear, llama3.")


def _token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids of all configs: a generation config often has more than the model config."""
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    for token_id in ids:
        _check_int("eos_token_id", token_id, 0, _SIZES["vocab_size"])
    return tuple(sorted(ids))


def _check_gguf_architecture(metadata: Mapping[str, Any]) -> None:
    architecture = _required(metadata, "general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported. "
            f"Supported: {', '.join(GGUF_ARCHITECTURES)}."
        )
    if metadata.get("llama.expert_count"):
        raise ConfigError("llama.expert_count: mixture-of-experts models are not supported.")
    if _or_default(metadata, "split.count", 1) > 1:
        raise ConfigError("split.count: merge the parts of a split GGUF into one file first.")


def _gguf_vocab_size(metadata: Mapping[str, Any]) -> Any:
    declared = metadata.get("llama.vocab_size")
    return len(_required(metadata, "tokenizer.ggml.tokens")) if declared is None else declared


def _gguf_head_dim(metadata: Mapping[str, Any], hidden_size: int, num_heads: int) -> Any:
    head_dim = _or_default(metadata, "llama.attention.key_length", hidden_size // num_heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if _or_default(metadata, name, head_dim) != head_dim:
            raise ConfigError(f"{name} must equal the head dimension, {head_dim}.")
    return head_dim


def _gguf_rope(metadata: Mapping[str, Any], factors: tuple[float, ...]) -> RopeConfig:
    theta = _or_default(metadata, "llama.rope.freq_base", 10000.0)
    if factors:
        return RopeConfig(theta=theta, kind="factors", factors=factors)
    scaling = _or_default(metadata, "llama.rope.scaling.type", "none")
    if scaling == "none":
        return RopeConfig(theta=theta)
    if scaling == "linear":
        factor = _required(metadata, "llama.rope.scaling.factor")
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    raise ConfigError(
        f"llama.rope.scaling.type {scaling!r} is not supported. Supported: none, linear."
    )


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    # End of turn and of message end a reply too, where a file tells them apart from end of text.
    names = ("eos", "eot", "eom")
    values = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return tuple(sorted({value for value in values if value is not None}))
