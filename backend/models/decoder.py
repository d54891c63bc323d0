"""A decoder-only model as its ModelConfig describes it: the forward pass of a flat batch."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.models.experts import Experts, Router, make_experts
from shoal.backend.models.layers import Attention, GatedMLP, RMSNorm, Weights
from shoal.backend.models.model_config import ExpertsConfig, LayerConfig, ModelConfig, RotaryKind
from shoal.backend.models.rope import rotary_inv_freq
from shoal.kernels.embedding import embedding
from shoal.kernels.linear import linear
from shoal.kernels.paged_attention import AttentionMetadata
from shoal.kernels.quantized_weights import Weight
from shoal.kernels.rotary_embedding import rotary_angles

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    config: LayerConfig
    input_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP | Experts
    # Of what attention and MLP give, in families that have them.
    attention_output_norm: RMSNorm | None = None
    mlp_output_norm: RMSNorm | None = None


class DecoderEnds(NamedTuple):
    """What is there once, before and after the layers."""

    embed_tokens: Weight  # [vocab_size, hidden_size]
    lm_head: Weight  # [vocab_size, hidden_size]; the same object where weights are tied
    norm: RMSNorm
    embedding_scale: float  # as rounded to the model's dtype; 1 where there is none


class Rotary(NamedTuple):
    """The frequencies of the layers that share a RoPE."""

    inv_freq: torch.Tensor  # float32 [head_dim / 2]
    factor: float  # of cosines and sines


class Decoder:
    """The model with its weights, for inference. ``forward`` mutates nothing but the cache."""

    def __init__(self, config: ModelConfig, tensors: MutableMapping[str, Weight]) -> None:
        """Take the tensors named by ``weight_shapes`` out of ``tensors``, leaving it empty."""
        weights, prefix = Weights(tensors), config.weight_prefix
        self.config = config
        self._embed_tokens = weights.take_weight(f"{prefix}embed_tokens.weight")
        self._layers = [
            _take_layer(config, layer, weights, f"{prefix}layers.{idx}")
            for idx, layer in enumerate(config.layers)
        ]
        self._norm = weights.take_norm(
            f"{prefix}norm", config.rms_norm_eps, config.unit_offset_norms
        )
        tied = config.tie_word_embeddings
        self._lm_head = self._embed_tokens if tied else weights.take_weight(config.head_name)
        self._rotaries = make_rotaries(config, self.device)
        self._embedding_scale = None
        if config.embedding_scale is not None:
            self._embedding_scale = torch.tensor(config.embedding_scale, device=self.device).to(
                self.dtype
            )

    @property
    def dtype(self) -> torch.dtype:
        return self._embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        return self._embed_tokens.device

    @staticmethod
    def weight_shapes(config: ModelConfig) -> Shapes:
        """Every tensor that a checkpoint of this model must hold, by its name in safetensors."""
        prefix = config.weight_prefix
        shapes: Shapes = {
            f"{prefix}embed_tokens.weight": (config.vocab_size, config.hidden_size),
            f"{prefix}norm.weight": (config.hidden_size,),
        }
        if not config.tie_word_embeddings:
            shapes[config.head_name] = (config.vocab_size, config.hidden_size)
        for idx, layer in enumerate(config.layers):
            parts = _layer_shapes(config, layer)
            shapes.update({f"{prefix}layers.{idx}.{name}": shape for name, shape in parts.items()})
        return shapes

    def take_ends(self) -> DecoderEnds:
        """Give away all but the layers, for another form of this model, so that no weight is held
        twice. ``forward`` cannot run afterwards."""
        scale = 1.0 if self._embedding_scale is None else float(self._embedding_scale)
        ends = DecoderEnds(self._embed_tokens, self._lm_head, self._norm, scale)
        del self._embed_tokens, self._lm_head, self._norm
        return ends

    def take_layers(self) -> Iterator[DecoderLayer]:
        """Give away the layers in order, each forgotten as the next one is asked for."""
        self._layers.reverse()
        while self._layers:
            yield self._layers.pop()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        """Run the batch, writing its keys and values to ``kv``.

        Returns float32 logits [num_samples, vocab_size] of the rows ``batch.logits_indices``.
        """
        layout = kv.layout
        metadata = [
            AttentionMetadata.build(
                tables.block_tables,
                batch.query_lens,
                tables.context_lens,
                kv.block_size,
                group.window,
                # What sessions evict by is measured where all tokens are kept.
                block_mass=batch.block_mass if group is layout.groups[0] else None,
                # Of the families with images all layers read them both ways.
                spans=batch.soft_tokens.spans if batch.soft_tokens is not None else None,
            )
            for group, tables in zip(layout.groups, batch.groups, strict=True)
        ]
        angles = {
            kind: rotary_angles(batch.positions, rotary.inv_freq, self.dtype, rotary.factor)
            for kind, rotary in self._rotaries.items()
        }
        hidden = self._embed(batch)
        for idx, layer in enumerate(self._layers):
            attended = layer.attention(
                layer.input_norm(hidden),
                angles.get(layer.config.rotary_kind),
                kv.layer(idx),
                batch.groups[layout.group_of[idx]].slot_mapping,
                metadata[layout.group_of[idx]],
            )
            hidden = hidden + _normed(attended, layer.attention_output_norm)
            hidden = hidden + _normed(layer.mlp(layer.mlp_norm(hidden)), layer.mlp_output_norm)
        # Rows are independent from here on, so only those that are sampled go on.
        hidden = self._norm(hidden[batch.logits_indices])
        if batch.hidden is not None:
            batch.hidden.states = hidden.float()
        return linear(hidden, self._lm_head).float()

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, hidden_size]; an image's embeddings are not scaled."""
        input_ids, soft = batch.input_ids, batch.soft_tokens
        if soft is not None:  # their ids may lie beyond the vocabulary
            input_ids = input_ids.index_fill(0, soft.rows, 0)
        hidden = embedding(input_ids, self._embed_tokens)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if soft is not None:
            hidden = hidden.index_copy(0, soft.rows, soft.embeddings.to(hidden.dtype))
        return hidden


def make_rotaries(config: ModelConfig, device: torch.device) -> dict[RotaryKind, Rotary]:
    """The frequencies of each RoPE that a model's layers use."""
    return {
        layer.rotary_kind: Rotary(
            rotary_inv_freq(layer.rope, layer.head_dim, device), layer.rope.attention_factor
        )
        for layer in config.layers
        if layer.rope is not None
    }


def _normed(states: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
    return states if norm is None else norm(states)


def _layer_shapes(config: ModelConfig, layer: LayerConfig) -> Shapes:
    hidden = config.hidden_size
    query = config.num_heads * layer.head_dim
    key = layer.num_kv_heads * layer.head_dim
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in _norm_names(config)}
    shapes |= _linear_shapes("self_attn.q_proj", query, hidden, config.attention_bias)
    shapes |= _linear_shapes("self_attn.k_proj", key, hidden, config.attention_bias)
    shapes |= _linear_shapes("self_attn.v_proj", key, hidden, config.attention_bias)
    shapes |= _linear_shapes("self_attn.o_proj", hidden, query, config.output_bias)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (layer.head_dim,)
        shapes["self_attn.k_norm.weight"] = (layer.head_dim,)
    if layer.is_sparse and config.experts is not None:
        return shapes | _expert_shapes(config.experts, hidden)
    inner = config.intermediate_size
    shapes |= _linear_shapes("mlp.gate_proj", inner, hidden, config.mlp_bias)
    shapes |= _linear_shapes("mlp.up_proj", inner, hidden, config.mlp_bias)
    shapes |= _linear_shapes("mlp.down_proj", hidden, inner, config.mlp_bias)
    return shapes


def _norm_names(config: ModelConfig) -> tuple[str, ...]:
    """Of the input, the MLP's input, and with sandwich norms of what attention and MLP give."""
    if not config.sandwich_norms:
        return ("input_layernorm", "post_attention_layernorm")
    return (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )


def _linear_shapes(name: str, out_features: int, in_features: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out_features, in_features)}
    if bias:
        shapes[f"{name}.bias"] = (out_features,)
    return shapes


def _expert_shapes(experts: ExpertsConfig, hidden: int) -> Shapes:
    names, inner = experts.names, experts.intermediate_size
    shapes: Shapes = {f"{names.block}.gate.weight": (experts.num_experts, hidden)}
    for idx in range(experts.num_experts):
        prefix = f"{names.block}.experts.{idx}"
        shapes[f"{prefix}.{names.gate}.weight"] = (inner, hidden)
        shapes[f"{prefix}.{names.up}.weight"] = (inner, hidden)
        shapes[f"{prefix}.{names.down}.weight"] = (hidden, inner)
    return shapes


def _take_layer(
    config: ModelConfig, layer: LayerConfig, weights: Weights, prefix: str
) -> DecoderLayer:
    def norm(name: str) -> RMSNorm:
        return weights.take_norm(f"{prefix}.{name}", config.rms_norm_eps, config.unit_offset_norms)

    norms = [norm(name) for name in _norm_names(config)]
    return DecoderLayer(
        layer,
        input_norm=norms[0],
        attention=Attention(
            q_proj=weights.take_linear(f"{prefix}.self_attn.q_proj", config.attention_bias),
            k_proj=weights.take_linear(f"{prefix}.self_attn.k_proj", config.attention_bias),
            v_proj=weights.take_linear(f"{prefix}.self_attn.v_proj", config.attention_bias),
            o_proj=weights.take_linear(f"{prefix}.self_attn.o_proj", config.output_bias),
            head_dim=layer.head_dim,
            scale=config.scale_of(layer),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        ),
        mlp_norm=norms[1],
        mlp=_take_mlp(config, layer, weights, prefix),
        attention_output_norm=norms[2] if config.sandwich_norms else None,
        mlp_output_norm=norms[3] if config.sandwich_norms else None,
    )


def _take_mlp(
    config: ModelConfig, layer: LayerConfig, weights: Weights, prefix: str
) -> GatedMLP | Experts:
    experts = config.experts
    if not layer.is_sparse or experts is None:
        return GatedMLP(
            gate=weights.take_linear(f"{prefix}.mlp.gate_proj", config.mlp_bias),
            up=weights.take_linear(f"{prefix}.mlp.up_proj", config.mlp_bias),
            down=weights.take_linear(f"{prefix}.mlp.down_proj", config.mlp_bias),
            activation=config.activation,
        )
    names, block = experts.names, f"{prefix}.{experts.names.block}"
    router = Router(
        weights.take_linear(f"{block}.gate"),
        experts.num_experts_per_token,
        experts.normalize,
        experts.float_weights,
    )
    return make_experts(
        router,
        [
            GatedMLP(
                gate=weights.take_linear(f"{block}.experts.{idx}.{names.gate}"),
                up=weights.take_linear(f"{block}.experts.{idx}.{names.up}"),
                down=weights.take_linear(f"{block}.experts.{idx}.{names.down}"),
                activation=config.activation,
            )
            for idx in range(experts.num_experts)
        ],
    )
