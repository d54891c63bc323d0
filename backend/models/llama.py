"""Llama and its look-alikes (SmolLM2 is one): the forward pass of a flat batch."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.models.layers import GatedMLP, Linear, RMSNorm, Weights, rotary_inv_freq
from shoal.backend.models.model_config import ModelConfig
from shoal.kernels.embedding import embedding
from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.linear import linear
from shoal.kernels.paged_attention import AttentionMetadata, paged_attention
from shoal.kernels.quantized_weights import Weight
from shoal.kernels.rotary_embedding import RotaryAngles, rotary_angles, rotary_embedding


@dataclass(frozen=True, slots=True)
class LlamaAttention:
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    head_dim: int

    def __call__(
        self,
        hidden: torch.Tensor,
        angles: RotaryAngles,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write this layer's keys and values to the cache, then attend over the cache."""
        by_head = (hidden.shape[0], -1, self.head_dim)
        query = rotary_embedding(self.q_proj(hidden).view(by_head), angles)
        key = rotary_embedding(self.k_proj(hidden).view(by_head), angles)
        value = self.v_proj(hidden).view(by_head)
        kv_cache_write(key, value, key_cache, value_cache, slot_mapping)
        output = paged_attention(query, key_cache, value_cache, metadata, self.head_dim**-0.5)
        return self.o_proj(output.flatten(1))


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    input_norm: RMSNorm
    attention: LlamaAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP


class LlamaEnds(NamedTuple):
    """What is there once, before and after the layers."""

    embed_tokens: Weight  # [vocab_size, hidden_size]
    lm_head: Weight  # [vocab_size, hidden_size]; the same object where weights are tied
    norm: RMSNorm
    inv_freq: torch.Tensor  # float32 [head_dim / 2]


class LlamaForCausalLM:
    """The model with its weights, for inference. ``forward`` mutates nothing but the cache."""

    def __init__(self, config: ModelConfig, tensors: MutableMapping[str, Weight]) -> None:
        """Take the tensors named by ``weight_shapes`` out of ``tensors``, leaving it empty."""
        weights = Weights(tensors)
        self.config = config
        self._embed_tokens = weights.take_weight("model.embed_tokens.weight")
        self._layers = [_take_layer(config, weights, idx) for idx in range(config.num_layers)]
        self._norm = weights.take_norm("model.norm", config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._lm_head = self._embed_tokens if tied else weights.take_weight("lm_head.weight")
        self._inv_freq = rotary_inv_freq(config, self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        return self._embed_tokens.device

    @staticmethod
    def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model must hold, by its name in safetensors."""
        shapes = {
            "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
            "model.norm.weight": (config.hidden_size,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        for idx in range(config.num_layers):
            layer = _layer_shapes(config)
            shapes.update({f"model.layers.{idx}.{name}": shape for name, shape in layer.items()})
        return shapes

    def take_ends(self) -> LlamaEnds:
        """Give away all but the layers, for another form of this model, so that no weight is held
        twice. ``forward`` cannot run afterwards."""
        ends = LlamaEnds(self._embed_tokens, self._lm_head, self._norm, self._inv_freq)
        del self._embed_tokens, self._lm_head, self._norm, self._inv_freq
        return ends

    def take_layers(self) -> Iterator[LlamaLayer]:
        """Give away the layers in order, each forgotten as the next one is asked for."""
        self._layers.reverse()
        while self._layers:
            yield self._layers.pop()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        """Run the batch, writing its keys and values to ``kv``.

        Returns float32 logits [num_samples, vocab_size] of the rows ``batch.logits_indices``.
        """
        (tables,) = batch.groups
        metadata = AttentionMetadata.build(
            tables.block_tables,
            batch.query_lens,
            batch.context_lens,
            kv.block_size,
            block_mass=batch.block_mass,
        )
        angles = rotary_angles(batch.positions, self._inv_freq, self.dtype)
        hidden = embedding(batch.input_ids, self._embed_tokens)  # [num_tokens, hidden_size]
        for idx, layer in enumerate(self._layers):
            hidden = hidden + layer.attention(
                layer.input_norm(hidden),
                angles,
                kv.keys(idx),
                kv.values(idx),
                tables.slot_mapping,
                metadata,
            )
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        # Rows are independent from here on, so only those that are sampled go on.
        hidden = self._norm(hidden[batch.logits_indices])
        return linear(hidden, self._lm_head).float()


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    biased = {"self_attn": config.attention_bias, "mlp": config.mlp_bias}
    for name, shape in list(shapes.items()):
        if biased.get(name.split(".")[0]):
            shapes[name.replace(".weight", ".bias")] = shape[:1]
    return shapes


def _take_layer(config: ModelConfig, weights: Weights, idx: int) -> LlamaLayer:
    prefix = f"model.layers.{idx}"
    bias = config.attention_bias
    return LlamaLayer(
        input_norm=weights.take_norm(f"{prefix}.input_layernorm", config.rms_norm_eps),
        attention=LlamaAttention(
            q_proj=weights.take_linear(f"{prefix}.self_attn.q_proj", bias),
            k_proj=weights.take_linear(f"{prefix}.self_attn.k_proj", bias),
            v_proj=weights.take_linear(f"{prefix}.self_attn.v_proj", bias),
            o_proj=weights.take_linear(f"{prefix}.self_attn.o_proj", bias),
            head_dim=config.head_dim,
        ),
        mlp_norm=weights.take_norm(f"{prefix}.post_attention_layernorm", config.rms_norm_eps),
        mlp=GatedMLP(
            gate=weights.take_linear(f"{prefix}.mlp.gate_proj", config.mlp_bias),
            up=weights.take_linear(f"{prefix}.mlp.up_proj", config.mlp_bias),
            down=weights.take_linear(f"{prefix}.mlp.down_proj", config.mlp_bias),
        ),
    )
