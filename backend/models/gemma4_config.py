"""The shape of a Gemma 4 text model: plain values, checked, without torch."""

from dataclasses import dataclass

from shoal.backend.engine_config import ConfigError
from shoal.backend.kv_layout import KVLayout, LayerKV
from shoal.backend.models.config_values import check_bool, check_int, check_positive
from shoal.backend.models.model_config import MAX_EXPERTS, SIZE_LIMITS


@dataclass(frozen=True, slots=True)
class Gemma4Rope:
    """The first ``rotated`` of a head's pairs turn by theta ** (-2i / head_dim) / factor, the
    others not at all: the proportional form, and with all of them the usual one."""

    theta: float
    rotated: float = 1.0  # fraction
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    num_kv_heads: int
    head_dim: int
    rope: Gemma4Rope
    intermediate_size: int
    window: int | None = None  # a query sees so many tokens, itself included; None: all before it
    shared_with: int | None = None  # an earlier layer whose keys and values it reads
    values_are_keys: bool = False  # values come from the key projection


@dataclass(frozen=True, slots=True)
class Gemma4Experts:
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of each expert


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """Sizes and constants. Raises ConfigError, naming the field."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    layers: tuple[Gemma4Layer, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    final_softcap: float | None = None
    per_layer_size: int = 0  # of the embedding that each layer adds; 0: it has none
    per_layer_vocab_size: int = 0
    experts: Gemma4Experts | None = None
    image_token_id: int | None = None  # None: the model sees no images
    pad_token_id: int = 0  # what per-layer embeddings take for an image's tokens
    images_attend_both_ways: bool = False  # within each image, in sliding layers
    weight_prefix: str = "model."  # of the text model in the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    family: str = "gemma4"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "max_position_embeddings"):
            check_int(name, getattr(self, name), 1, SIZE_LIMITS[name])
        check_int("num_layers", len(self.layers), 1, SIZE_LIMITS["num_layers"])
        check_positive("rms_norm_eps", self.rms_norm_eps)
        for name in ("tie_word_embeddings", "attention_bias"):
            check_bool(name, getattr(self, name))
        if self.final_softcap is not None:
            check_positive("final_logit_softcapping", self.final_softcap)
        check_int("hidden_size_per_layer_input", self.per_layer_size, 0, SIZE_LIMITS["hidden_size"])
        if self.per_layer_size:
            check_int(
                "vocab_size_per_layer_input",
                self.per_layer_vocab_size,
                self.vocab_size,
                SIZE_LIMITS["vocab_size"],
            )
        for layer in self.layers:
            _check_layer(layer, self.num_heads)
            if layer.shared_with is not None:
                _check_shared(layer, self.layers[layer.shared_with])
        if self.experts is not None:
            _check_experts(self.experts, self.hidden_size)
        check_int("pad_token_id", self.pad_token_id, 0, self.vocab_size - 1)
        bos = 0 if self.bos_token_id is None else self.bos_token_id
        for token_id in (*self.eos_token_ids, bos):
            check_int("bos_token_id and eos_token_id", token_id, 0, self.vocab_size - 1)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def first_shared_layer(self) -> int:
        """From this layer on, none keeps keys and values of its own; ``num_layers`` if all do."""
        shared = [idx for idx, layer in enumerate(self.layers) if layer.shared_with is not None]
        return min(shared, default=self.num_layers)

    @property
    def shares_keys(self) -> bool:
        """Whether the last layers keep no keys and values of their own."""
        return self.first_shared_layer < self.num_layers

    @property
    def kv_layout(self) -> KVLayout:
        """The keys and values that the model's layers keep."""
        return KVLayout.of(
            [
                LayerKV(layer.num_kv_heads, layer.head_dim, layer.window, layer.shared_with)
                for layer in self.layers
            ]
        )


def _check_layer(layer: Gemma4Layer, num_heads: int) -> None:
    check_int("num_key_value_heads", layer.num_kv_heads, 1, SIZE_LIMITS["num_kv_heads"])
    check_int("head_dim", layer.head_dim, 2, SIZE_LIMITS["head_dim"])
    if num_heads % layer.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({layer.num_kv_heads})."
        )
    if layer.head_dim % 2:
        raise ConfigError(f"head_dim ({layer.head_dim}) must be even.")


def _check_shared(layer: Gemma4Layer, source: Gemma4Layer) -> None:
    if (layer.num_kv_heads, layer.head_dim) != (source.num_kv_heads, source.head_dim):
        raise ConfigError("num_kv_shared_layers: layers that share keys must have equal heads.")


def _check_experts(experts: Gemma4Experts, hidden_size: int) -> None:
    check_int("num_experts", experts.num_experts, 1, MAX_EXPERTS)
    check_int("top_k_experts", experts.num_experts_per_token, 1, experts.num_experts)
    check_int(
        "moe_intermediate_size", experts.intermediate_size, 1, SIZE_LIMITS["intermediate_size"]
    )
    if hidden_size % 8 or experts.intermediate_size % 8:
        raise ConfigError(
            "hidden_size and moe_intermediate_size must be multiples of 8, as the product over "
            "experts needs."
        )
