"""A decoder on the native CPU kernels: ``decoder.py``'s model as one planned call."""

import torch

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.models.any_config import ServedConfig
from shoal.backend.models.decoder import Decoder, DecoderLayer, make_rotaries
from shoal.backend.models.layers import GatedMLP, Linear
from shoal.backend.models.model_config import ModelConfig
from shoal.backend.models.native_step import StepBuilder
from shoal.kernels.native_heads import AttentionHeads
from shoal.kernels.native_library import Epilogue, NativeLibrary, PackedLinear
from shoal.kernels.native_plan import NativePlan, PlanBuilder
from shoal.kernels.quantized_weights import QuantizedWeight, Weight, join


def missing_ops(config: ServedConfig) -> str | None:
    """What a model needs and the native kernels lack; None if they can run it."""
    if not isinstance(config, ModelConfig):
        return f"the layers of {config.family}"
    kinds = set(config.layers)
    missing = {
        "layers of several kinds": len(kinds) > 1,
        "sliding windows": any(layer.window for layer in kinds),
        "layers without rotation": any(layer.rope is None for layer in kinds),
        "scaled rotations": any(layer.rope and layer.rope.attention_factor != 1 for layer in kinds),
        "experts": config.experts is not None,
        "QK-norm": config.qk_norm,
        "norms after attention and MLP": config.sandwich_norms,
        "scaled embeddings": config.embedding_scale is not None,
        f"the activation {config.activation}": config.activation != "silu",
    }
    return ", ".join(name for name, is_missing in missing.items() if is_missing) or None


class NativeDecoder:
    """Batch-invariant: a sequence's logits have the same bits whatever runs beside it, and whether
    its tokens came at once, in chunks, one by one or again after a preemption."""

    def __init__(self, model: Decoder, library: NativeLibrary) -> None:
        """Take the weights out of ``model``, layer by layer, which cannot run afterwards."""
        self.config = model.config
        self.dtype = model.dtype
        self.device = torch.device("cpu")
        self._plan = _build_plan(model, library)
        self._step = StepBuilder(self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        """Run the batch, writing its keys and values to ``kv``.

        Returns float32 logits [num_samples, vocab_size] of the rows ``batch.logits_indices``.
        """
        _check_ids(batch.input_ids, self.config)
        logits = torch.empty(len(batch.logits_indices), self.config.vocab_size)
        self._plan.run(self._step.arguments(batch, kv, logits))
        return logits


def _check_ids(input_ids: torch.Tensor, config: ModelConfig) -> None:
    """As torch's embedding does; the kernels would read beyond the weight."""
    low, high = input_ids.aminmax()
    if int(low) < 0 or int(high) >= config.vocab_size:
        raise IndexError(f"token ids must be in [0, {config.vocab_size - 1}]")


def _build_plan(model: Decoder, library: NativeLibrary) -> NativePlan:
    config = model.config
    plan = PlanBuilder(library, model.dtype)
    embedding, lm_head, norm = model.take_ends()
    (rotary,) = make_rotaries(config, torch.device("cpu")).values()
    packed_head = library.pack_linear(lm_head)
    tied = embedding is lm_head
    del lm_head
    hidden = plan.buffer(config.hidden_size, torch.float32)
    angles = plan.buffer(config.head_dim, torch.float32)
    normed = plan.buffer(config.hidden_size)
    query_width = config.num_heads * config.head_dim
    key_width = config.num_kv_heads * config.head_dim
    qkv = plan.buffer(query_width + 2 * key_width, torch.float32)
    query = plan.buffer(query_width)
    attended = plan.buffer(query_width)
    gated = plan.buffer(config.intermediate_size)

    plan.embed(packed_head if tied else _pack_embedding(library, embedding), out=hidden)
    del embedding
    plan.rotary_angles(rotary.inv_freq, out=angles)
    for idx, layer in enumerate(model.take_layers()):
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, GatedMLP)
        heads = AttentionHeads(
            config.num_heads, config.num_kv_heads, config.head_dim, attention.scale
        )
        plan.rms_norm(hidden, layer.input_norm.weight, layer.input_norm.eps, out=normed)
        plan.linear(normed, _pack_qkv(library, layer), out=qkv)
        plan.rotate_and_write(qkv, angles, idx, heads, out=query)
        plan.attention(query, idx, heads, out=attended)
        plan.linear(attended, _pack(library, attention.o_proj), hidden, Epilogue.ADD)
        plan.rms_norm(hidden, layer.mlp_norm.weight, layer.mlp_norm.eps, out=normed)
        gate_up = library.pack_gated(mlp.gate.weight, mlp.up.weight, mlp.gate.bias, mlp.up.bias)
        plan.linear(normed, gate_up, gated, Epilogue.SILU_MUL)
        plan.linear(gated, _pack(library, mlp.down), hidden, Epilogue.ADD)
    plan.select_norm(hidden, norm.weight, norm.eps, out=normed)
    plan.logits(normed, packed_head)
    return plan.build()


def _pack_embedding(library: NativeLibrary, weight: Weight) -> torch.Tensor | PackedLinear:
    """Dense rows stay as they are; those of a quantised weight are read from its panels."""
    return library.pack_linear(weight) if isinstance(weight, QuantizedWeight) else weight


def _pack(library: NativeLibrary, linear: Linear) -> PackedLinear:
    return library.pack_linear(linear.weight, linear.bias)


def _pack_qkv(library: NativeLibrary, layer: DecoderLayer) -> PackedLinear:
    """Queries, keys and values as one product."""
    parts = (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
    biases = [part.bias for part in parts if part.bias is not None]
    weight = join([part.weight for part in parts])
    return library.pack_linear(weight, torch.cat(biases) if biases else None)
