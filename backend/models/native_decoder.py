"""A decoder on the native CPU kernels: ``decoder.py``'s model as one planned call."""

import torch

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.models.decoder import Decoder, DecoderLayer, make_rotaries
from shoal.backend.models.experts import Experts
from shoal.backend.models.layers import GatedMLP, Linear, RMSNorm
from shoal.backend.models.model_config import ExpertsConfig, ModelConfig, RotaryKind
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
    screen,
    wants_tokens,
)
from shoal.backend.models.native_step import StepBuilder
from shoal.kernels.native_heads import AttentionHeads, HeadNorms
from shoal.kernels.native_library import Epilogue, NativeLibrary
from shoal.kernels.native_plan import ExpertBuffers, ExpertProducts, NativePlan, PlanBuilder
from shoal.kernels.quantized_weights import dense
from shoal.kernels.screened_head import LEAST_COLUMNS


class NativeDecoder:
    """Batch-invariant: a sequence's logits have the same bits whatever runs beside it, and whether
    its tokens came at once, in chunks, one by one or again after a preemption."""

    def __init__(self, model: Decoder, library: NativeLibrary) -> None:
        """Take the weights out of ``model``, layer by layer, which cannot run afterwards."""
        self.config = model.config
        self.dtype = model.dtype
        self.device = torch.device("cpu")
        self.plan, self.head = _build_plans(model, library)
        self._step = StepBuilder(self.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        """Run the batch, writing its keys and values to ``kv``.

        Returns float32 logits [num_samples, vocab_size] of the rows ``batch.logits_indices``. They
        mean nothing where the batch asks for the likeliest tokens and gets them.
        """
        if batch.soft_tokens is not None:
            raise NotImplementedError("the native kernels do not run images")
        check_ids(batch.input_ids, self.config.vocab_size)
        logits = logits_memory(batch, self.config.vocab_size)
        states = None
        if batch.hidden is not None:
            states = torch.empty(len(batch.logits_indices), self.config.hidden_size)
            batch.hidden.states = states
        tokens = wants_tokens(batch, self.plan)
        self.plan.run(self._step.arguments(batch, kv, logits, states=states, tokens=tokens))
        return logits


def _build_plans(model: Decoder, library: NativeLibrary) -> tuple[NativePlan, NativeHead]:
    config, dtype = model.config, model.dtype
    plan = PlanBuilder(library, dtype)
    ends = model.take_ends()
    embedding, packed_head = pack_ends(library, ends.embed_tokens, ends.lm_head)
    screened = screen(ends.lm_head)
    norm, scale = ends.norm, ends.embedding_scale
    del ends
    hidden = plan.buffer(config.hidden_size, torch.float32)
    plan.embed(embedding, out=hidden, scale=scale)
    del embedding
    layers = _LayerPlanner(plan, library, config, hidden)
    for idx, layer in enumerate(model.take_layers()):
        layers.add(idx, layer)
    plan.select_norm(hidden, norm.weight, norm.eps, out=layers.normed)

    def add_head(plan: PlanBuilder, states: int) -> None:
        if packed_head.bias is None and packed_head.out_features >= LEAST_COLUMNS:
            plan.likeliest(states, packed_head, screened)
        plan.logits(states, packed_head)

    add_head(plan, layers.normed)
    plan.keep_states(layers.normed)
    head = NativeHead(library, dtype, config.hidden_size, config.vocab_size, add_head)
    return plan.build(), head


class _LayerPlanner:
    """Lays out layers one after another; they share their buffers, as wide as the widest needs."""

    def __init__(
        self, plan: PlanBuilder, library: NativeLibrary, config: ModelConfig, hidden: int
    ) -> None:
        self._plan, self._library, self._config, self._hidden = plan, library, config, hidden
        self.normed = plan.buffer(config.hidden_size)
        self._gated = plan.buffer(config.intermediate_size)
        # Where what attention and MLP give is normalised before it is added.
        self._output = plan.buffer(config.hidden_size, torch.float32)
        self._angles: dict[RotaryKind, int] = {}
        for kind, rotary in make_rotaries(config, torch.device("cpu")).items():
            self._angles[kind] = plan.buffer(2 * len(rotary.inv_freq), torch.float32)
            plan.rotary_angles(rotary.inv_freq, self._angles[kind], rotary.factor)
        self._expert_buffers: ExpertBuffers | None = None
        self._router_logits = -1
        self._head_buffers = HeadBuffers(plan)

    def add(self, idx: int, layer: DecoderLayer) -> None:
        """The operations of the layer with this index."""
        self._plan.rms_norm(
            self._hidden, layer.input_norm.weight, layer.input_norm.eps, out=self.normed
        )
        attended = self._attention(idx, layer)
        self._add_product(attended, layer.attention.o_proj, layer.attention_output_norm)
        mlp = layer.mlp
        self._plan.rms_norm(
            self._hidden, layer.mlp_norm.weight, layer.mlp_norm.eps, out=self.normed
        )
        if not isinstance(mlp, GatedMLP):
            assert layer.mlp_output_norm is None
            self._experts(mlp)
            return
        gate_up = self._library.pack_gated(
            mlp.gate.weight, mlp.up.weight, mlp.gate.bias, mlp.up.bias
        )
        self._plan.linear(self.normed, gate_up, self._gated, GATED_EPILOGUES[mlp.activation])
        self._add_product(self._gated, mlp.down, layer.mlp_output_norm)

    def _attention(self, idx: int, layer: DecoderLayer) -> int:
        """Returns the buffer of what the heads give."""
        attention, config = layer.attention, layer.config
        heads = AttentionHeads(
            self._config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            attention.scale,
            config.window,
            attention.softcap,
        )
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = HeadNorms(
                attention.q_norm.eps,
                attention.q_norm.weight.float(),
                attention.k_norm.weight.float(),
            )
        packed = pack_side_by_side(
            self._library, [attention.q_proj, attention.k_proj, attention.v_proj]
        )
        qkv, query, attended = self._head_buffers.of(heads, packed.out_features)
        self._plan.linear(self.normed, packed, out=qkv)
        angles = self._angles.get(config.rotary_kind)
        self._plan.rotate_and_write(qkv, angles, idx, heads, out=query, norms=norms)
        self._plan.attention(query, idx, heads, out=attended)
        return attended

    def _experts(self, experts: Experts) -> None:
        """Add what the chosen experts give to the hidden states."""
        config = self._config.experts
        assert config is not None
        if self._expert_buffers is None:
            self._router_logits = self._plan.buffer(config.num_experts, torch.float32)
            self._expert_buffers = expert_buffers(
                self._plan,
                self._config.hidden_size,
                config.intermediate_size,
                config.num_experts_per_token,
            )
        router = pack(self._library, experts.router.proj)
        self._plan.linear(self.normed, router, out=self._router_logits)
        products = _pack_experts(self._library, experts, config)
        self._plan.experts(
            self.normed, self._router_logits, products, self._expert_buffers, out=self._hidden
        )

    def _add_product(self, states: int, linear: Linear, norm: RMSNorm | None) -> None:
        """Add a product, normalised if there is a norm, to the hidden states."""
        packed = pack(self._library, linear)
        if norm is None:
            self._plan.linear(states, packed, self._hidden, Epilogue.ADD)
        else:
            self._plan.linear(states, packed, self._output)
            self._plan.add_norm(self._output, norm.weight, norm.eps, out=self._hidden)


def _pack_experts(
    library: NativeLibrary, experts: Experts, config: ExpertsConfig
) -> ExpertProducts:
    """All experts' products, dense whatever their format."""
    gate_ups, downs = [], []
    for gate, up, down in experts.weights():
        gate_ups.append(library.pack_gated(dense(gate), dense(up), stays=False))
        downs.append(library.pack_linear(dense(down), stays=False))
    return ExpertProducts(
        library.join_packed(gate_ups),
        library.join_packed(downs),
        config.num_experts,
        config.num_experts_per_token,
        config.normalize,
        GATED_EPILOGUES[experts.activation],
    )
