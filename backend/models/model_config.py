"""The shape of a model: plain values, checked, without torch.

Made by a family's readers (``families/``) from ``config.json`` or GGUF metadata; see ``registry``.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shoal.backend.engine_config import ConfigError
from shoal.backend.kv_layout import KVLayout, LayerKV
from shoal.backend.models.config_values import check_bool, check_int, check_positive

# Upper limits: far above any real model, low enough that no product of them overflows.
SIZE_LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_layers": 4096,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 2**26,
}
MAX_EXPERTS = 4096
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "factors")
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: theta ** (-2i / head_dim), then scaled according to ``kind``.

    linear divides them all by ``factor``; llama3 divides the long wavelengths and blends between
    ``low_freq_factor`` and ``high_freq_factor``; yarn blends between ``beta_fast`` and
    ``beta_slow`` rotations; factors divides each by its own number (GGUF's precomputed form of
    llama3). Cosines and sines are multiplied by ``attention_factor``.
    """

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()  # [head_dim / 2] of kind factors
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


RotaryKind = tuple[RopeConfig | None, int]  # and the head's size


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What the layers of a model may differ in."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: the layer knows no positions
    window: int | None = None  # a query sees so many tokens, itself included; None: all before it
    is_sparse: bool = False  # its MLP is a mixture of experts

    @property
    def rotary_kind(self) -> RotaryKind:
        """Equal for layers that share their cosines and sines."""
        return (self.rope, self.head_dim)


class ExpertNames(NamedTuple):
    """What a checkpoint calls the parts of a mixture of experts within a layer."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture-of-experts MLPs of a model."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of each expert
    normalize: bool = True  # the chosen experts' weights sum to 1
    float_weights: bool = False  # and stay float32 instead of being rounded to the model's dtype
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder-only model. Raises ConfigError, naming the field."""

    family: str  # a name in the registry
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str = "silu"  # of the gated MLP, one of ACTIVATIONS
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised by head, before the rotation
    sandwich_norms: bool = False  # what attention and MLP give is normalised too
    unit_offset_norms: bool = False  # norms multiply by 1 + weight, and round once
    embedding_scale: float | None = None
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    experts: ExpertsConfig | None = None
    image_token_id: int | None = None  # None: the model sees no images
    weight_prefix: str = "model."  # of the text model in the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads"):
            check_int(name, getattr(self, name), 1, SIZE_LIMITS[name])
        check_int("max_position_embeddings", self.max_position_embeddings, 1, 2**26)
        check_int("num_layers", len(self.layers), 1, SIZE_LIMITS["num_layers"])
        for name in _FLAGS:
            check_bool(name, getattr(self, name))
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation must be one of {', '.join(ACTIVATIONS)}.")
        for layer in self.layers:
            self._check_layer(layer)
        check_positive("rms_norm_eps", self.rms_norm_eps)
        for name in ("embedding_scale", "attention_scale"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.experts is not None:
            _check_experts(self.experts)
        if self.bos_token_id is not None:
            check_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        for token_id in self.eos_token_ids:
            check_int("eos_token_id", token_id, 0, self.vocab_size - 1)

    @property
    def head_name(self) -> str:
        """The output projection's tensor in the checkpoint, where it is one of its own."""
        return self.weight_prefix.removesuffix("model.") + "lm_head.weight"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_layout(self) -> KVLayout:
        """The keys and values that the model's layers keep."""
        return KVLayout.of(
            [LayerKV(layer.num_kv_heads, layer.head_dim, layer.window) for layer in self.layers]
        )

    @property
    def num_kv_heads(self) -> int:
        """Of the first layer; layers may differ."""
        return self.layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Of the first layer; layers may differ."""
        return self.layers[0].head_dim

    def scale_of(self, layer: LayerConfig) -> float:
        """What attention scores are multiplied by."""
        return layer.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def _check_layer(self, layer: LayerConfig) -> None:
        check_int("num_kv_heads", layer.num_kv_heads, 1, SIZE_LIMITS["num_kv_heads"])
        check_int("head_dim", layer.head_dim, 1, SIZE_LIMITS["head_dim"])
        if self.num_heads % layer.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({layer.num_kv_heads})."
            )
        if layer.head_dim % 2:
            raise ConfigError(f"head_dim ({layer.head_dim}) must be even.")
        if layer.window is not None:
            check_int("sliding_window", layer.window, 1, SIZE_LIMITS["max_position_embeddings"])
        if layer.rope is not None:
            _check_rope(layer.rope, layer.head_dim)
        if layer.is_sparse and self.experts is None:
            raise ConfigError("a layer has experts, but the number of experts is missing.")


_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "sandwich_norms",
    "unit_offset_norms",
)


def _check_experts(experts: ExpertsConfig) -> None:
    check_int("num_experts", experts.num_experts, 1, MAX_EXPERTS)
    check_int("num_experts_per_tok", experts.num_experts_per_token, 1, experts.num_experts)
    check_int(
        "moe_intermediate_size", experts.intermediate_size, 1, SIZE_LIMITS["intermediate_size"]
    )
    check_bool("norm_topk_prob", experts.normalize)


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if rope.kind not in ROPE_KINDS:
        raise ConfigError(f"rope type must be one of {', '.join(ROPE_KINDS)}.")
    for name in (
        "theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ):
        check_positive(f"rope {name}", getattr(rope, name))
    check_int(
        "rope original_max_position_embeddings",
        rope.original_max_positions,
        1,
        SIZE_LIMITS["max_position_embeddings"],
    )
    check_bool("rope truncate", rope.truncate)
    if rope.kind == "llama3" and not rope.high_freq_factor > rope.low_freq_factor:
        raise ConfigError("rope high_freq_factor must be above low_freq_factor.")
    if rope.kind == "yarn" and not rope.theta > 1:
        raise ConfigError("rope theta must be above 1 with yarn.")
    if rope.kind == "factors":
        if len(rope.factors) != head_dim // 2:
            raise ConfigError(f"rope_freqs.weight must hold {head_dim // 2} numbers.")
        for value in rope.factors:
            check_positive("rope_freqs.weight", value)
