"""Gemma 4, dense or with experts, with or without per-layer embeddings: the text pass."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.models.gemma4_config import Gemma4Config, Gemma4Rope
from shoal.backend.models.layers import GatedMLP, Linear, Weights
from shoal.kernels.embedding import embedding
from shoal.kernels.expert_mlp import expert_mlp
from shoal.kernels.gelu_and_mul import gelu_and_mul
from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.linear import linear
from shoal.kernels.paged_attention import AttentionMetadata, paged_attention
from shoal.kernels.quantized_weights import Weight
from shoal.kernels.rms_norm_power import rms_norm_power
from shoal.kernels.rotary_embedding import RotaryAngles, rotary_angles, rotary_embedding


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor | None  # None: normalised only
    eps: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm_power(hidden, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class KeyValueProjection:
    """What only layers with keys and values of their own have."""

    k_proj: Linear
    v_proj: Linear | None  # None: values are what k_proj gives
    k_norm: Norm
    v_norm: Norm

    def __call__(
        self, hidden: torch.Tensor, head_dim: int, angles: RotaryAngles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values: [num_tokens, num_kv_heads, head_dim] each."""
        by_head = (hidden.shape[0], -1, head_dim)
        raw = self.k_proj(hidden).view(by_head)
        value = raw if self.v_proj is None else self.v_proj(hidden).view(by_head)
        return rotary_embedding(self.k_norm(raw), angles), self.v_norm(value)


@dataclass(frozen=True, slots=True)
class Attention:
    q_proj: Linear
    q_norm: Norm
    key_value: KeyValueProjection | None  # None: the layer reads another's
    o_proj: Linear
    head_dim: int

    def __call__(
        self,
        hidden: torch.Tensor,
        angles: RotaryAngles,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write this layer's keys and values, if it has any, then attend over the cache."""
        query = self.q_norm(self.q_proj(hidden).view(hidden.shape[0], -1, self.head_dim))
        query = rotary_embedding(query, angles)
        if self.key_value is not None:
            key, value = self.key_value(hidden, self.head_dim, angles)
            kv_cache_write(key, value, cache, slot_mapping)
        # Queries and keys are normalised, so scores are not scaled.
        output = paged_attention(query, cache, metadata, scale=1.0)
        return self.o_proj(output.flatten(1))


@dataclass(frozen=True, slots=True)
class Experts:
    """Runs beside the dense MLP, on the same residual states."""

    norm: Norm
    router_norm: Norm
    router_scale: torch.Tensor  # [hidden_size]
    router: Linear
    expert_scale: torch.Tensor  # [num_experts]
    gate_up: torch.Tensor  # [num_experts, 2 * intermediate_size, hidden_size]
    down: torch.Tensor  # [num_experts, hidden_size, intermediate_size]
    num_chosen: int
    dense_output_norm: Norm
    output_norm: Norm

    def __call__(self, residual: torch.Tensor, dense_output: torch.Tensor) -> torch.Tensor:
        """The dense MLP's and the experts' outputs, normalised and added."""
        expert_ids, weights = self._choose(residual)
        output = expert_mlp(
            self.norm(residual), self.gate_up, self.down, expert_ids, weights, gelu_and_mul
        )
        return self.dense_output_norm(dense_output) + self.output_norm(output)

    def _choose(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Expert ids and float32 weights, [num_tokens, num_chosen] each.
        states = self.router_norm(residual) * self.router_scale * residual.shape[-1] ** -0.5
        probabilities = functional.softmax(self.router(states), dim=-1, dtype=torch.float32)
        weights, expert_ids = torch.topk(probabilities, self.num_chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return expert_ids, weights * self.expert_scale[expert_ids]


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """Adds the layer's own embedding of each token, gated by the hidden states."""

    gate: Linear
    projection: Linear
    norm: Norm

    def __call__(self, hidden: torch.Tensor, own_embedding: torch.Tensor) -> torch.Tensor:
        gated = gelu_and_mul(self.gate(hidden), own_embedding)
        return hidden + self.norm(self.projection(gated))


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Norm
    attention: Attention
    attention_output_norm: Norm
    mlp_norm: Norm
    mlp: GatedMLP
    experts: Experts | None
    mlp_output_norm: Norm
    per_layer_input: PerLayerInput | None
    scalar: torch.Tensor  # [1]

    def feed_forward(
        self, hidden: torch.Tensor, own_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        """All that follows the attention. ``own_embedding`` [num_tokens, per_layer_size]."""
        output = self.mlp(self.mlp_norm(hidden))
        if self.experts is not None:
            output = self.experts(hidden, output)
        hidden = hidden + self.mlp_output_norm(output)
        if self.per_layer_input is not None and own_embedding is not None:
            hidden = self.per_layer_input(hidden, own_embedding)
        return hidden * self.scalar


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """For each token and layer a small vector, from the token and from its embedding."""

    embed_tokens: torch.Tensor  # [per_layer_vocab_size, num_layers * per_layer_size]
    projection: Linear
    norm: Norm
    size: int

    def __call__(self, input_ids: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_layers, size]."""
        by_layer = (len(input_ids), -1, self.size)
        identity = _embed(input_ids, self.embed_tokens, self.size).view(by_layer)
        context = self.projection(embeds).mul(embeds.shape[-1] ** -0.5).view(by_layer)
        return (self.norm(context) + identity).mul(2.0**-0.5)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the batch that go through a layer, and what they need there."""

    hidden: torch.Tensor  # [num_rows, hidden_size]
    own_embeddings: torch.Tensor | None  # [num_rows, num_layers, per_layer_size]
    angles: dict[tuple[Gemma4Rope, int], RotaryAngles]  # by rope and head size
    metadata: list[AttentionMetadata]  # by KV group

    def only(self, hidden: torch.Tensor, rows: torch.Tensor, num_kept: list[int]) -> "Rows":
        """Of ``hidden`` and the rest only ``rows``, the last ``num_kept`` of each sequence."""
        own = self.own_embeddings
        return Rows(
            hidden[rows],
            None if own is None else own[rows],
            {
                key: RotaryAngles(angles.cos[rows], angles.sin[rows])
                for key, angles in self.angles.items()
            },
            [metadata.last_queries(num_kept) for metadata in self.metadata],
        )


class Gemma4Ends(NamedTuple):
    """What is there once, before and after the layers."""

    embed_tokens: Weight  # [vocab_size, hidden_size]
    lm_head: Weight  # [vocab_size, hidden_size]; the same object where weights are tied
    norm: Norm
    per_layer: PerLayerEmbedding | None


class Gemma4ForCausalLM:
    """The model with its weights, for inference. ``forward`` mutates nothing but the cache."""

    def __init__(self, config: Gemma4Config, tensors: MutableMapping[str, Weight]) -> None:
        """Take the tensors named by ``weight_shapes`` out of ``tensors``, leaving it empty."""
        weights = Weights(tensors)
        prefix = config.weight_prefix
        self.config = config
        self._embed_tokens = weights.take_weight(f"{prefix}embed_tokens.weight")
        self._per_layer = _take_per_layer(config, weights) if config.per_layer_size else None
        self._layers = [_take_layer(config, weights, idx) for idx in range(config.num_layers)]
        self._norm = Norm(weights.take(f"{prefix}norm.weight"), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._lm_head = self._embed_tokens if tied else weights.take_weight("lm_head.weight")
        self._inv_freqs = {
            (layer.rope, layer.head_dim): rope_inv_freq(layer.rope, layer.head_dim).to(self.device)
            for layer in config.layers
        }

    @property
    def dtype(self) -> torch.dtype:
        return self._embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        return self._embed_tokens.device

    def take_ends(self) -> Gemma4Ends:
        """Give away all but the layers, for another form of this model, so that no weight is held
        twice. ``forward`` cannot run afterwards."""
        ends = Gemma4Ends(self._embed_tokens, self._lm_head, self._norm, self._per_layer)
        del self._embed_tokens, self._lm_head, self._norm, self._per_layer
        return ends

    def take_layers(self) -> Iterator[Layer]:
        """Give away the layers in order, each forgotten as the next one is asked for."""
        self._layers.reverse()
        while self._layers:
            yield self._layers.pop()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        """Run the batch, writing its keys and values to ``kv``.

        Layers at the end that keep no keys of their own see only the rows that are sampled.
        Returns float32 logits [num_samples, vocab_size] of the rows ``batch.logits_indices``.
        """
        rows = self._embed(batch, kv)
        hidden, is_cut = rows.hidden, False
        for idx, layer in enumerate(self._layers):
            if idx == self.config.first_shared_layer:
                num_kept = sample_lens(batch)
                if not any(num_kept):
                    return torch.empty(0, self.config.vocab_size, device=self.device)
                rows = rows.only(hidden, batch.logits_indices, num_kept)
                hidden, is_cut = rows.hidden, True
            shape = self.config.layers[idx]
            group = kv.layout.group_of[idx]
            attended = layer.attention(
                layer.input_norm(hidden),
                rows.angles[shape.rope, shape.head_dim],
                kv.layer(idx),
                batch.groups[group].slot_mapping,
                rows.metadata[group],
            )
            hidden = hidden + layer.attention_output_norm(attended)
            own = rows.own_embeddings
            hidden = layer.feed_forward(hidden, None if own is None else own[:, idx])
        hidden = self._norm(hidden if is_cut else hidden[batch.logits_indices])
        if batch.hidden is not None:
            batch.hidden.states = hidden.float()
        return self._logits(hidden)

    def _embed(self, batch: ForwardBatch, kv: PagedKVCache) -> Rows:
        input_ids, soft = batch.input_ids, batch.soft_tokens
        if soft is not None:
            input_ids = input_ids.index_fill(0, soft.rows, self.config.pad_token_id)
        hidden = _embed(input_ids, self._embed_tokens, self.config.hidden_size)
        if soft is not None:
            hidden = hidden.index_copy(0, soft.rows, soft.embeddings.to(hidden.dtype))
        spans = soft.spans if soft and self.config.images_attend_both_ways else None
        return Rows(
            hidden,
            self._per_layer(input_ids, hidden) if self._per_layer else None,
            {
                key: rotary_angles(batch.positions, inv_freq, self.dtype)
                for key, inv_freq in self._inv_freqs.items()
            },
            [
                AttentionMetadata.build(
                    tables.block_tables,
                    batch.query_lens,
                    tables.context_lens,
                    kv.block_size,
                    group.window,
                    block_mass=batch.block_mass if group is kv.layout.groups[0] else None,
                    spans=spans if group.window is not None else None,
                )
                for tables, group in zip(batch.groups, kv.layout.groups, strict=True)
            ],
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, self._lm_head)
        cap = self.config.final_softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


def embedding_scale(width: int, dtype: torch.dtype) -> torch.Tensor:
    """What embeddings of this width are multiplied by, rounded to the model's dtype."""
    return torch.tensor(width**0.5, dtype=dtype)


def _embed(input_ids: torch.Tensor, weight: Weight, width: int) -> torch.Tensor:
    return embedding(input_ids, weight) * embedding_scale(width, weight.dtype)


def rope_inv_freq(rope: Gemma4Rope, head_dim: int) -> torch.Tensor:
    """Float32 [head_dim / 2], 0 where a pair does not turn; arithmetic order of transformers."""
    num_rotated = int(rope.rotated * head_dim // 2)
    exponents = torch.arange(0, 2 * num_rotated, 2, dtype=torch.float32) / head_dim
    still = torch.zeros(head_dim // 2 - num_rotated)
    return torch.cat((1.0 / (rope.theta**exponents), still)) / rope.factor


def sample_lens(batch: ForwardBatch) -> list[int]:
    """How many tokens of each sequence are sampled from: the last ones."""
    rows = batch.logits_indices.tolist()
    counts, start, end = [], 0, 0
    for query_len in batch.query_lens:
        end += query_len
        count = sum(start <= row < end for row in rows)
        assert rows[:count] == list(range(end - count, end)), "only last tokens are sampled from"
        rows = rows[count:]
        counts.append(count)
        start = end
    return counts


def _take_per_layer(config: Gemma4Config, weights: Weights) -> PerLayerEmbedding:
    prefix = config.weight_prefix
    return PerLayerEmbedding(
        embed_tokens=weights.take(f"{prefix}embed_tokens_per_layer.weight"),
        projection=weights.take_linear(f"{prefix}per_layer_model_projection"),
        norm=Norm(weights.take(f"{prefix}per_layer_projection_norm.weight"), config.rms_norm_eps),
        size=config.per_layer_size,
    )


def _take_layer(config: Gemma4Config, weights: Weights, idx: int) -> Layer:
    prefix = f"{config.weight_prefix}layers.{idx}."

    def norm(name: str) -> Norm:
        return Norm(weights.take(f"{prefix}{name}.weight"), config.rms_norm_eps)

    def project(name: str, bias: bool = False) -> Linear:
        return weights.take_linear(f"{prefix}{name}", bias)

    layer = config.layers[idx]
    bias = config.attention_bias
    key_value = None
    if layer.shared_with is None:
        key_value = KeyValueProjection(
            k_proj=project("self_attn.k_proj", bias),
            v_proj=None if layer.values_are_keys else project("self_attn.v_proj", bias),
            k_norm=norm("self_attn.k_norm"),
            v_norm=Norm(None, config.rms_norm_eps),
        )
    experts = None
    if config.experts is not None:
        experts = Experts(
            norm=norm("pre_feedforward_layernorm_2"),
            router_norm=Norm(None, config.rms_norm_eps),
            router_scale=weights.take(f"{prefix}router.scale"),
            router=project("router.proj"),
            expert_scale=weights.take(f"{prefix}router.per_expert_scale"),
            gate_up=weights.take(f"{prefix}experts.gate_up_proj"),
            down=weights.take(f"{prefix}experts.down_proj"),
            num_chosen=config.experts.num_experts_per_token,
            dense_output_norm=norm("post_feedforward_layernorm_1"),
            output_norm=norm("post_feedforward_layernorm_2"),
        )
    per_layer_input = None
    if config.per_layer_size:
        per_layer_input = PerLayerInput(
            gate=project("per_layer_input_gate"),
            projection=project("per_layer_projection"),
            norm=norm("post_per_layer_input_norm"),
        )
    return Layer(
        input_norm=norm("input_layernorm"),
        attention=Attention(
            q_proj=project("self_attn.q_proj", bias),
            q_norm=norm("self_attn.q_norm"),
            key_value=key_value,
            o_proj=project("self_attn.o_proj", bias),
            head_dim=layer.head_dim,
        ),
        attention_output_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=GatedMLP(
            project("mlp.gate_proj"), project("mlp.up_proj"), project("mlp.down_proj"), "gelu_tanh"
        ),
        experts=experts,
        mlp_output_norm=norm("post_feedforward_layernorm"),
        per_layer_input=per_layer_input,
        scalar=weights.take(f"{prefix}layer_scalar"),
    )
