"""Gemma 4 on the native CPU kernels: ``gemma4.py``'s model as one planned call."""

import torch

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.models.gemma4 import (
    Attention,
    Experts,
    Gemma4ForCausalLM,
    Layer,
    Norm,
    PerLayerEmbedding,
    PerLayerInput,
    embedding_scale,
    rope_inv_freq,
    sample_lens,
)
from shoal.backend.models.gemma4_config import Gemma4Config, Gemma4Rope
from shoal.backend.models.layers import GatedMLP, Linear
from shoal.backend.models.native_head import NativeHead
from shoal.backend.models.native_parts import (
    GATED_EPILOGUES,
    HeadBuffers,
    check_ids,
    expert_buffers,
    logits_memory,
    pack,
    pack_ends,
    pack_side_by_side,
)
from shoal.backend.models.native_step import StepBuilder
from shoal.kernels.native_heads import AttentionHeads, HeadNorms, NewKeys
from shoal.kernels.native_library import Epilogue, NativeLibrary
from shoal.kernels.native_plan import ExpertBuffers, ExpertProducts, NativePlan, PlanBuilder


class NativeGemma4:
    """Batch-invariant, as ``NativeDecoder`` is. Runs text only."""

    def __init__(self, model: Gemma4ForCausalLM, library: NativeLibrary) -> None:
        """Take the weights out of ``model``, layer by layer, which cannot run afterwards."""
        self.config = model.config
        self.dtype = model.dtype
        self.device = torch.device("cpu")
        self.plan, self.head = _build_plans(model, library)
        self._step = StepBuilder(self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        """Run the batch, writing its keys and values to ``kv``.

        Layers at the end that keep no keys of their own see only the rows that are sampled.
        Returns float32 logits [num_samples, vocab_size] of the rows ``batch.logits_indices``.
        """
        if batch.soft_tokens is not None:
            raise NotImplementedError("the native kernels do not run images")
        check_ids(batch.input_ids, self.config.vocab_size)
        logits = logits_memory(batch, self.config.vocab_size)
        num_sampled = sample_lens(batch) if self.config.shares_keys else None
        states = None
        if batch.hidden is not None:
            states = torch.empty(len(batch.logits_indices), self.config.hidden_size)
            batch.hidden.states = states
        self.plan.run(self._step.arguments(batch, kv, logits, num_sampled, states))
        return logits


def _build_plans(model: Gemma4ForCausalLM, library: NativeLibrary) -> tuple[NativePlan, NativeHead]:
    config, dtype = model.config, model.dtype
    plan = PlanBuilder(library, dtype)
    ends = model.take_ends()
    embedding, packed_head = pack_ends(library, ends.embed_tokens, ends.lm_head)
    norm, per_layer = ends.norm, ends.per_layer
    del ends
    layers = _LayerPlanner(plan, library, config)
    scale = float(embedding_scale(config.hidden_size, dtype))
    plan.embed(embedding, out=layers.hidden, scale=scale)
    del embedding
    if per_layer is not None:
        layers.embed_per_layer(per_layer, dtype)
    for idx, layer in enumerate(model.take_layers()):
        if idx == config.first_shared_layer:
            layers.select()
        layers.add(idx, layer)
    last_norm = plan.rms_norm if config.shares_keys else plan.select_norm
    last_norm(layers.hidden, _weight(norm), norm.eps, out=layers.normed)

    def add_head(plan: PlanBuilder, states: int) -> None:
        plan.logits(states, packed_head)
        if config.final_softcap is not None:
            plan.softcap(config.final_softcap, config.vocab_size)

    add_head(plan, layers.normed)
    plan.keep_states(layers.normed)
    head = NativeHead(library, dtype, config.hidden_size, config.vocab_size, add_head)
    return plan.build(), head


class _LayerPlanner:
    """Lays out layers one after another; they share their buffers."""

    def __init__(self, plan: PlanBuilder, library: NativeLibrary, config: Gemma4Config) -> None:
        self._plan, self._library, self._config = plan, library, config
        self.hidden = plan.buffer(config.hidden_size, torch.float32)
        self.normed = plan.buffer(config.hidden_size)
        # What attention and MLP give, which is normalised before it is added.
        self._output = plan.buffer(config.hidden_size, torch.float32)
        self._gated: dict[int, int] = {}  # by the width of the MLP
        self._angles: dict[tuple[Gemma4Rope, int], int] = {}
        for key in dict.fromkeys((layer.rope, layer.head_dim) for layer in config.layers):
            inv_freq = rope_inv_freq(*key)
            self._angles[key] = plan.buffer(2 * len(inv_freq), torch.float32)
            plan.rotary_angles(inv_freq, self._angles[key])
        self._head_buffers = HeadBuffers(plan)
        self._own_embeddings = -1  # all layers', side by side
        self._own_gate = plan.buffer(config.per_layer_size, torch.float32)
        self._own_gated = plan.buffer(config.per_layer_size)
        self._expert_buffers: ExpertBuffers | None = None
        self._expert_output = -1
        self._router_logits = -1

    def embed_per_layer(self, per_layer: PerLayerEmbedding, dtype: torch.dtype) -> None:
        """The sum of both embeddings times 2 ** -0.5, of which each layer takes its own part."""
        config, size = self._config, per_layer.size
        width = config.num_layers * size
        self._own_embeddings = self._plan.buffer(width, torch.float32)
        half = 2.0**-0.5
        scale = float(embedding_scale(size, dtype)) * half
        self._plan.embed(per_layer.embed_tokens, out=self._own_embeddings, scale=scale)
        projected = self._plan.buffer(width, torch.float32)
        self._plan.round(self.hidden, out=self.normed)
        self._plan.linear(self.normed, pack(self._library, per_layer.projection), out=projected)
        # What is projected is divided by sqrt(hidden_size) before its norm, which is the norm with
        # an epsilon that is so much larger.
        eps = per_layer.norm.eps * config.hidden_size
        weight = _weight(per_layer.norm).float() * half
        self._plan.add_norm(projected, weight, eps, out=self._own_embeddings)

    def select(self) -> None:
        """From here on there are only the rows that are sampled."""
        self.hidden = self._plan.select(self.hidden)
        self._angles = {key: self._plan.select(angles) for key, angles in self._angles.items()}
        if self._own_embeddings >= 0:
            self._own_embeddings = self._plan.select(self._own_embeddings)

    def add(self, idx: int, layer: Layer) -> None:
        """The operations of the layer with this index."""
        self._norm(layer.input_norm)
        self._product(self._attention(idx, layer.attention), layer.attention.o_proj)
        self._add_output(layer.attention_output_norm)
        self._norm(layer.mlp_norm)
        self._mlp(layer.mlp)
        if layer.experts is not None:
            self._experts(layer.experts)
        scalar = float(layer.scalar)
        if layer.per_layer_input is None:
            self._add_output(layer.mlp_output_norm, scalar)
            return
        self._add_output(layer.mlp_output_norm)
        self._per_layer_input(idx, layer.per_layer_input, scalar)

    def _attention(self, idx: int, attention: Attention) -> int:
        """Returns the buffer of what the heads give."""
        config, key_value = self._config.layers[idx], attention.key_value
        heads = AttentionHeads(
            self._config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=1.0,  # queries and keys are normalised
            window=config.window,
        )
        parts, new_keys, key_norm = [attention.q_proj], NewKeys.NONE, None
        if key_value is not None:
            parts.append(key_value.k_proj)
            new_keys, key_norm = NewKeys.VALUES_ARE_KEYS, key_value.k_norm.weight
            if key_value.v_proj is not None:
                parts.append(key_value.v_proj)
                new_keys = NewKeys.OWN
        norms = HeadNorms(
            attention.q_norm.eps, attention.q_norm.weight, key_norm, value=key_value is not None
        )
        packed = pack_side_by_side(self._library, parts)
        row, query, attended = self._head_buffers.of(heads, packed.out_features)
        self._plan.linear(self.normed, packed, out=row)
        angles = self._angles[config.rope, config.head_dim]
        self._plan.rotate_and_write(
            row, angles, idx, heads, out=query, norms=norms, new_keys=new_keys
        )
        self._plan.attention(query, idx, heads, out=attended)
        return attended

    def _mlp(self, mlp: GatedMLP) -> None:
        width = mlp.gate.weight.shape[0]
        if width not in self._gated:
            self._gated[width] = self._plan.buffer(width)
        gate_up = self._library.pack_gated(mlp.gate.weight, mlp.up.weight)
        epilogue = GATED_EPILOGUES[mlp.activation]
        self._plan.linear(self.normed, gate_up, self._gated[width], epilogue)
        self._product(self._gated[width], mlp.down)

    def _experts(self, experts: Experts) -> None:
        """Normalise what the dense MLP gives, and add what the experts do, normalised too."""
        config, hidden_size = self._config.experts, self._config.hidden_size
        assert config is not None
        if self._expert_buffers is None:
            self._router_logits = self._plan.buffer(config.num_experts, torch.float32)
            self._expert_output = self._plan.buffer(hidden_size, torch.float32)
            self._expert_buffers = expert_buffers(
                self._plan, hidden_size, config.intermediate_size, experts.num_chosen
            )
        scale = experts.router_scale.float() * hidden_size**-0.5
        self._plan.rms_norm(self.hidden, scale, experts.router_norm.eps, out=self.normed)
        router = pack(self._library, experts.router)
        self._plan.linear(self.normed, router, out=self._router_logits)
        self._norm(experts.norm)
        self._plan.experts(
            self.normed,
            self._router_logits,
            _pack_experts(self._library, experts),
            self._expert_buffers,
            out=self._expert_output,
            is_sum=False,
        )
        dense, own = experts.dense_output_norm, experts.output_norm
        self._plan.add_norm(self._output, _weight(dense), dense.eps, out=self._output, is_sum=False)
        self._plan.add_norm(self._expert_output, _weight(own), own.eps, out=self._output)

    def _per_layer_input(self, idx: int, part: PerLayerInput, scalar: float) -> None:
        """Add the layer's own embeddings, gated; then multiply all by its scalar."""
        self._plan.round(self.hidden, out=self.normed)
        self._plan.linear(self.normed, pack(self._library, part.gate), out=self._own_gate)
        first = idx * self._config.per_layer_size
        self._plan.gelu_mul(self._own_gate, self._own_embeddings, first, out=self._own_gated)
        self._product(self._own_gated, part.projection)
        self._add_output(part.norm, scalar)

    def _norm(self, norm: Norm) -> None:
        self._plan.rms_norm(self.hidden, _weight(norm), norm.eps, out=self.normed)

    def _product(self, states: int, linear: Linear) -> None:
        self._plan.linear(states, pack(self._library, linear), self._output, Epilogue.STORE)

    def _add_output(self, norm: Norm, factor: float = 1.0) -> None:
        """Hidden states, plus what the last product gave, normalised, times ``factor``."""
        self._plan.add_norm(self._output, _weight(norm), norm.eps, out=self.hidden, factor=factor)


def _weight(norm: Norm) -> torch.Tensor:
    assert norm.weight is not None
    return norm.weight


def _pack_experts(library: NativeLibrary, experts: Experts) -> ExpertProducts:
    """All experts' products."""
    gate_ups = [library.pack_gated(*both.chunk(2), stays=False) for both in experts.gate_up]
    downs = [library.pack_linear(down, stays=False) for down in experts.down]
    return ExpertProducts(
        library.join_packed(gate_ups),
        library.join_packed(downs),
        len(experts.gate_up),
        experts.num_chosen,
        normalize=True,
        epilogue=Epilogue.GELU_MUL,
        factors=experts.expert_scale,
    )
