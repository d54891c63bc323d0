"""A forward pass as one native call: operations over numbered buffers, laid out once at load."""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from shoal.kernels.native_heads import AttentionHeads, HeadNorms, NewKeys, PlanHeads
from shoal.kernels.native_library import (
    TYPE_IDS,
    Epilogue,
    NativeLibrary,
    PackedLinear,
    pointer,
)
from shoal.kernels.screened_head import LEAST_COLUMNS, ScreenedHead

MODEL_TYPE = None  # a buffer's type: that of the weights


class OpKind(IntEnum):
    """As in ``native/plan_step.h``."""

    EMBED = 0
    ROTARY_ANGLES = 1
    RMS_NORM = 2
    SELECT_NORM = 3
    LINEAR = 4
    LOGITS = 5
    ROTATE_AND_WRITE = 6
    ATTENTION = 7
    ADD_NORM = 8
    ROUTE = 9
    SORT_ROWS = 10
    GATHER = 11
    EXPERT_LINEAR = 12
    COMBINE = 13
    ROUND = 14
    GELU_MUL = 15
    SELECT = 16
    SOFTCAP = 17
    KEEP_STATES = 18
    SCREEN_ROWS = 19
    PREPARE = 20
    SCREEN = 21
    GREEDY = 22
    TAKE_STATES = 23


class _Op(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("in_", ctypes.c_int32),
        ("in2", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("scalar", ctypes.c_float),
        ("packed", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int64),
        ("columns", ctypes.c_void_p),
        ("factor", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("width", ctypes.c_int64),
        ("element_size", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class StepGroup(ctypes.Structure):
    """Layers that share block tables."""

    _fields_ = [
        ("max_blocks", ctypes.c_int64),
        ("block_tables", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
    ]


_STEP_SIZES = (
    "num_tokens",
    "num_seqs",
    "num_samples",
    "block_size",
    "num_threads",
    "stored",
    "keys_in_panels",
)
_STEP_POINTERS = (
    "input_ids",
    "positions",
    "query_lens",
    "sample_lens",
    "logits_indices",
    "groups",
    "layer_groups",
    "key_caches",
    "value_caches",
    "key_scales",
    "value_scales",
    "logits",
    "block_mass",
    "hidden_states",
    "tokens",
    "op_nanoseconds",
)


class StepArguments(ctypes.Structure):
    """A step: sizes and addresses of tensors, whose shapes ``native/plan_step.h`` has."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _STEP_SIZES),
        *((name, ctypes.c_void_p) for name in _STEP_POINTERS),
    ]


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The experts of a layer: dense weights of one shape, packed one after another."""

    gate_up: PackedLinear  # of one expert; its weight holds those of all
    down: PackedLinear
    num_experts: int
    num_chosen: int  # for each token
    normalize: bool  # the weights of the chosen ones sum to 1
    epilogue: Epilogue
    factors: torch.Tensor | None = None  # [num_experts], of what each gives


class ExpertBuffers(NamedTuple):
    """Buffers of ``num_chosen`` rows a token."""

    rows: int  # of the hidden size
    gated: int  # of the experts' intermediate size
    outputs: int  # float32, of the hidden size


class OpTime(NamedTuple):
    """How long an operation of a plan took, by the clock of its first thread."""

    kind: OpKind
    n: int  # of a product, its columns
    k: int  # of a product, its inputs
    seconds: float


class PlanBuilder:
    """Collects the operations of a model's forward pass, in order.

    A buffer holds one row a token and is named by a number. States between products are float32;
    what enters a product is of the model's dtype.
    """

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        self._heads: list[PlanHeads] = []
        self._ops: list[_Op] = []
        self._num_sparse_layers = 0
        self._buffers: list[_Buffer] = []
        self._weights: list[torch.Tensor] = []  # kept alive for the plan
        self._prepared: dict[int, int] = {}  # buffers for prepared rows, by their bytes
        self._screens = False

    def buffer(self, width: int, dtype: torch.dtype | None = MODEL_TYPE) -> int:
        """A new buffer of rows of ``width`` elements."""
        self._buffers.append(_Buffer(width, (dtype or self._dtype).itemsize, 0))
        return len(self._buffers) - 1

    def embed(self, weight: torch.Tensor | PackedLinear, out: int, scale: float = 1.0) -> None:
        """Rows of an embedding; a packed one is shared with the output projection."""
        if isinstance(weight, PackedLinear):
            fields = self._weight_fields(weight)
            self._add(OpKind.EMBED, out=out, packed=True, scalar=scale, **fields)
        else:
            self._add(OpKind.EMBED, out=out, weight=self._keep(weight), scalar=scale)

    def rotary_angles(self, inv_freq: torch.Tensor, out: int, factor: float = 1.0) -> None:
        """Cosines and sines of the tokens' positions: rows of 2 * len(inv_freq) float32."""
        self._add(
            OpKind.ROTARY_ANGLES,
            out=out,
            weight=self._keep(inv_freq.float()),
            k=len(inv_freq),
            scalar=factor,
        )

    def rms_norm(self, states: int, weight: torch.Tensor, eps: float, out: int) -> None:
        self._add(
            OpKind.RMS_NORM, in_=states, out=out, weight=self._keep(weight.float()), scalar=eps
        )

    def add_norm(
        self,
        states: int,
        weight: torch.Tensor,
        eps: float,
        out: int,
        factor: float = 1.0,
        is_sum: bool = True,
    ) -> None:
        """``out`` becomes (out + the RMS norm of ``states``) * factor; without ``is_sum`` that norm
        * factor. All are float32; ``states`` is overwritten. Where it is wider than ``weight``, its
        parts of that width are normalised each."""
        self._add(
            OpKind.ADD_NORM,
            in_=states,
            out=out,
            weight=self._keep(weight.float()),
            scalar=eps,
            n=self._buffers[states].width // len(weight),
            factor=factor,
            packed=not is_sum,
        )

    def round(self, states: int, out: int) -> None:
        """Float32 states in the model's dtype."""
        self._add(OpKind.ROUND, in_=states, out=out)

    def gelu_mul(self, gate: int, up: int, first_column: int, out: int) -> None:
        """gelu(gate) * up, of which columns from ``first_column`` on count; both are float32."""
        self._add(OpKind.GELU_MUL, in_=gate, in2=up, k=first_column, out=out)

    def select(self, states: int) -> int:
        """The rows that are sampled, in a new buffer. Operations after the first selection see only
        such rows."""
        shape = self._buffers[states]
        self._buffers.append(_Buffer(shape.width, shape.element_size, 0))
        out = len(self._buffers) - 1
        self._add(OpKind.SELECT, in_=states, out=out)
        return out

    def select_norm(self, states: int, weight: torch.Tensor, eps: float, out: int) -> None:
        """RMS norm of the rows that are sampled, and only those."""
        self._add(
            OpKind.SELECT_NORM, in_=states, out=out, weight=self._keep(weight.float()), scalar=eps
        )

    def take_states(self, out: int) -> None:
        """The step's hidden states, one a sampled row, in the model's dtype: what a plan begins
        with that goes on where another one left them."""
        self._add(OpKind.TAKE_STATES, out=out)

    def linear(
        self, states: int, packed: PackedLinear, out: int, epilogue: Epilogue = Epilogue.STORE
    ) -> None:
        self._linear(OpKind.LINEAR, packed, in_=states, out=out, epilogue=epilogue)

    def keep_states(self, states: int) -> None:
        """The selected rows, which logits are made of, to the step's hidden states, where those are
        wanted."""
        self._add(OpKind.KEEP_STATES, in_=states)

    def logits(self, states: int, packed: PackedLinear) -> None:
        """The last product, of the selected rows, into the step's logits."""
        self._linear(OpKind.LOGITS, packed, in_=states)

    def likeliest(
        self, states: int, packed: PackedLinear, screen: ScreenedHead | None = None
    ) -> None:
        """From here on a step may ask for the likeliest tokens instead of its logits, which come of
        the same states and weight and are chosen from as they are. ``screen`` is of that weight;
        without one the weight itself says which tokens come into question."""
        assert packed.bias is None
        assert packed.out_features >= LEAST_COLUMNS
        rows = states
        if packed.format.prepares_rows:
            rows = self._prepare(states, packed, only_samples=True)
        if screen is None:
            self._add(OpKind.SCREEN, in_=rows, **self._weight_fields(packed))
        else:
            self._add(OpKind.SCREEN_ROWS, in_=states, k=screen.packed.in_features)
            self._add(OpKind.SCREEN, packed=True, **self._weight_fields(screen.packed))
        self._add(OpKind.GREEDY, in_=rows, **self._weight_fields(packed))
        self._screens = True

    def softcap(self, cap: float, num_columns: int) -> None:
        """The step's logits become cap * tanh(logit / cap)."""
        self._add(OpKind.SOFTCAP, scalar=cap, n=num_columns)

    def experts(
        self,
        states: int,
        router: int,
        products: ExpertProducts,
        buffers: ExpertBuffers,
        out: int,
        is_sum: bool = True,
    ) -> None:
        """Add to ``out`` what the experts chosen by the router's logits give for ``states``;
        without ``is_sum`` replace it."""
        gate_up, down = products.gate_up, products.down
        sizes = {"n": products.num_experts, "k": products.num_chosen}
        layer = {"heads": self._num_sparse_layers}
        self._num_sparse_layers += 1
        factors = products.factors
        self._add(
            OpKind.ROUTE,
            in_=router,
            packed=products.normalize,
            weight=None if factors is None else self._keep(factors.float()),
            **sizes,
            **layer,
        )
        self._add(OpKind.SORT_ROWS, **sizes, **layer)
        self._add(OpKind.GATHER, in_=states, out=buffers.rows, k=gate_up.in_features, **layer)
        self._add(
            OpKind.EXPERT_LINEAR,
            in_=buffers.rows,
            out=buffers.gated,
            epilogue=products.epilogue,
            layer=down.in_features,
            **self._weight_fields(gate_up),
            **layer,
        )
        self._add(
            OpKind.EXPERT_LINEAR,
            in_=buffers.gated,
            out=buffers.outputs,
            epilogue=Epilogue.STORE,
            **self._weight_fields(down),
            **layer,
        )
        self._add(
            OpKind.COMBINE,
            in_=buffers.outputs,
            out=out,
            n=down.out_features,
            k=products.num_chosen,
            packed=not is_sum,
            **layer,
        )

    def rotate_and_write(
        self,
        qkv: int,
        angles: int | None,
        layer_idx: int,
        heads: AttentionHeads,
        out: int,
        norms: HeadNorms | None = None,
        new_keys: NewKeys = NewKeys.OWN,
    ) -> None:
        """Normed and rotated queries to ``out``; keys and values to the layer's cache.

        The buffer ``angles`` is as wide as what is rotated of a head; None: nothing is.
        """
        rotary_dim = 0 if angles is None else self._buffers[angles].width
        kept = norms and HeadNorms(
            norms.eps, self._keep_norm(norms.query), self._keep_norm(norms.key), norms.value
        )
        self._heads.append(PlanHeads.of(heads, rotary_dim, kept, new_keys))
        self._add(
            OpKind.ROTATE_AND_WRITE,
            in_=qkv,
            in2=-1 if angles is None else angles,
            out=out,
            layer=layer_idx,
            heads=len(self._heads) - 1,
        )

    def attention(self, query: int, layer_idx: int, heads: AttentionHeads, out: int) -> None:
        """Attend over the layer's cache."""
        self._heads.append(PlanHeads.of(heads))
        self._add(OpKind.ATTENTION, in_=query, out=out, layer=layer_idx, heads=len(self._heads) - 1)

    def build(self) -> "NativePlan":
        return NativePlan(
            self._library,
            self._dtype,
            self._ops,
            self._buffers,
            self._heads,
            self._weights,
            self._screens,
        )

    def _linear(self, kind: OpKind, packed: PackedLinear, in_: int, **fields: Any) -> None:
        if packed.format.prepares_rows:
            in_ = self._prepare(in_, packed, only_samples=kind is OpKind.LOGITS)
        bias = None if packed.bias is None else self._keep(packed.bias)
        self._add(kind, in_=in_, bias=bias, **self._weight_fields(packed), **fields)

    def _prepare(self, states: int, packed: PackedLinear, only_samples: bool) -> int:
        """States in the form in which a product reads them; returns their buffer."""
        width = self._library.row_bytes(packed)
        if width not in self._prepared:  # one lasts until the product that follows it
            self._prepared[width] = self.buffer(width, torch.uint8)
        out = self._prepared[width]
        fields = self._weight_fields(packed)
        self._add(OpKind.PREPARE, in_=states, out=out, packed=only_samples, **fields)
        return out

    def _weight_fields(self, packed: PackedLinear) -> dict[str, Any]:
        return {
            "weight": self._keep(packed.weight),
            "n": packed.out_features,
            "k": packed.in_features,
            "format": packed.format,
            "group": packed.group_size,
            "columns": None if packed.columns is None else self._keep(packed.columns),
        }

    def _keep_norm(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        if weight is None:
            return None
        kept = weight.float().contiguous()
        self._keep(kept)
        return kept

    def _keep(self, tensor: torch.Tensor) -> int | None:
        tensor = tensor.contiguous()
        self._weights.append(tensor)
        return pointer(tensor)

    def _add(self, kind: OpKind, **fields: Any) -> None:
        self._ops.append(_Op(kind=kind, **fields))


class NativePlan:
    """A forward pass that is ready to run; it owns its weights and buffers.

    Not for two threads at once: the buffers are its own.
    """

    def __init__(
        self,
        library: NativeLibrary,
        dtype: torch.dtype,
        ops: list[_Op],
        buffers: list[_Buffer],
        heads: list[PlanHeads],
        weights: list[torch.Tensor],
        screens: bool,
    ) -> None:
        self.screens = screens  # whether a step may ask for its likeliest tokens alone
        self._functions = library.functions
        self._weights = weights
        self._handle = self._functions.shoal_plan_create(
            TYPE_IDS[dtype],
            (_Op * len(ops))(*ops),
            len(ops),
            (_Buffer * len(buffers))(*buffers),
            len(buffers),
            (PlanHeads * len(heads))(*heads),
            len(heads),
        )
        if not self._handle:
            raise MemoryError("the native kernels ran out of memory")
        self._ops = ops
        self._nanoseconds: ctypes.Array[ctypes.c_int64] | None = None

    def start_timing(self) -> None:
        """Time each operation of the steps from now on, at some 50 ns each."""
        self._nanoseconds = (ctypes.c_int64 * len(self._ops))()

    def op_times(self) -> list[OpTime]:
        """Of the steps since ``start_timing``, together."""
        assert self._nanoseconds is not None
        return [
            OpTime(OpKind(op.kind), op.n, op.k, nanoseconds / 1e9)
            for op, nanoseconds in zip(self._ops, self._nanoseconds, strict=True)
        ]

    def run(self, arguments: StepArguments) -> None:
        """Run one step. Releases the GIL meanwhile."""
        if self._nanoseconds is not None:
            arguments.op_nanoseconds = ctypes.addressof(self._nanoseconds)
        if self._functions.shoal_plan_run(self._handle, ctypes.addressof(arguments)):
            raise MemoryError("the native kernels ran out of memory")

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._functions.shoal_plan_destroy(handle)
