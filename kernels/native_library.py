"""The compiled CPU kernels, loaded by ctypes: each op as a function of torch tensors.

What the ops compute is said in ``native/*.h``. Whatever else is in a batch, a row's bits are the
same: the reference ops, on top of torch, promise no such thing.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import torch

from shoal.kernels.huge_pages import Arena
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.native_build import NativeBuildError, Notify, build_library
from shoal.kernels.native_heads import (
    STORED_IDS,
    AttentionHeads,
    BatchArguments,
    CacheArguments,
    HeadNorms,
    NewKeys,
    PlanHeads,
    check_cache,
)
from shoal.kernels.native_openmp import share_torch_openmp
from shoal.kernels.native_signatures import SIGNATURES
from shoal.kernels.quantized_panels import pack_panels
from shoal.kernels.quantized_weights import QuantizedWeight, Weight, dense, join

TYPE_IDS = {torch.float32: 0, torch.bfloat16: 1}
PANEL = 32  # columns of a packed panel


class Epilogue(IntEnum):
    """What a product does with its sums (and its bias); as in ``native/linear.h``."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_MUL = 3

    @property
    def is_gated(self) -> bool:
        """Whether the weight is of ``pack_gated``."""
        return self in (Epilogue.SILU_MUL, Epilogue.GELU_MUL)


class PackedFormat(IntEnum):
    """As in ``native/quantized.h``, which has the layouts."""

    DENSE = 0
    INT8 = 1
    INT4 = 2
    FP8 = 3
    INT4_SHORT = 4  # the same with short heads

    @property
    def prepares_rows(self) -> bool:
        """Whether states are brought into another form before the product."""
        return self in (PackedFormat.INT8, PackedFormat.INT4, PackedFormat.INT4_SHORT)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [out_features, in_features] in the kernels' order, made by ``pack_linear``."""

    weight: torch.Tensor  # flat, in the model's dtype; bytes where it is quantised
    bias: torch.Tensor | None  # float32, one for each column of the panels
    out_features: int
    in_features: int
    dtype: torch.dtype
    format: PackedFormat = PackedFormat.DENSE
    group_size: int = 0
    columns: torch.Tensor | None = None  # int64 [in_features]: which feature each column takes


def load_native(directory: Path, notify: Notify | None = None) -> "NativeLibrary":
    """Build the library where needed and load it. Raises NativeBuildError, saying why not."""
    path = build_library(directory, notify)
    share_torch_openmp()
    try:
        return NativeLibrary(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise NativeBuildError(f"{path.name} cannot be loaded: {error}") from error


class NativeLibrary:
    """The kernels' functions. Tensors must be contiguous and on the CPU; this is checked."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.functions = library
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._arena = Arena()

    @property
    def instructions(self) -> str:
        """Which vector instructions this build uses."""
        return str(self.functions.shoal_instructions().decode())

    @property
    def has_bf16(self) -> bool:
        """Whether this CPU multiplies bfloat16 itself, which makes it the faster type."""
        return "bf16" in self.instructions

    def pack_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, stays: bool = True
    ) -> PackedLinear:
        """Copy ``weight`` [out_features, in_features] into panels, packed as it is where the
        kernels know its format. Weights that ``stays`` lie side by side in the order of calls."""
        empty = self._arena.empty if stays else _flat
        panels = None
        if isinstance(weight, QuantizedWeight):
            panels = pack_panels(weight, lambda num_bytes: empty(num_bytes, torch.uint8))
        if panels is not None:
            return PackedLinear(
                panels.values,
                _wide(bias),
                *weight.shape,
                weight.dtype,
                PackedFormat[panels.format],
                panels.group_size,
                panels.columns,
            )
        source = dense(weight).contiguous()
        rows, columns = source.shape
        type_id = TYPE_IDS[source.dtype]
        num_elements = self.functions.shoal_packed_elements(type_id, rows, columns)
        packed = empty(num_elements, source.dtype)
        self.functions.shoal_pack(type_id, pointer(source), pointer(packed), rows, columns)
        return PackedLinear(packed, _wide(bias), rows, columns, source.dtype)

    def pack_gated(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        stays: bool = True,
    ) -> PackedLinear:
        """Pack two weights of one shape for a gated epilogue: 16 rows of each in turn."""
        bias = None
        if gate_bias is not None and up_bias is not None:
            bias = _interleave(gate_bias, up_bias)
        both = join([gate, up])
        if isinstance(both, QuantizedWeight):
            return self.pack_linear(both.take(_interleaved_rows(gate.shape[0])), bias, stays)
        return self.pack_linear(_interleave(dense(gate), dense(up)), bias, stays)

    def join_packed(self, parts: Sequence[PackedLinear]) -> PackedLinear:
        """Weights of one shape, packed to be joined, one after another under the description of
        each."""
        assert len({(part.out_features, part.in_features, part.format) for part in parts}) == 1
        first = parts[0].weight
        whole = self._arena.empty(len(parts) * first.numel(), first.dtype)
        torch.cat([part.weight for part in parts], out=whole)
        return replace(parts[0], weight=whole)

    def row_bytes(self, packed: PackedLinear) -> int:
        """Bytes of a row of states as the product reads it."""
        return int(
            self.functions.shoal_row_bytes(
                TYPE_IDS[packed.dtype], packed.format, packed.in_features, packed.group_size
            )
        )

    def linear(
        self,
        states: torch.Tensor,
        packed: PackedLinear,
        epilogue: Epilogue = Epilogue.STORE,
        out: torch.Tensor | None = None,
        out_features: int | None = None,
    ) -> torch.Tensor:
        """``states`` [num_tokens, in_features] times the weight.

        Returns float32, added to ``out`` with ADD; when gated the model's dtype, and
        ``out_features`` says how many of gate's (padded) rows count.
        """
        num_tokens = states.shape[0]
        gated = epilogue.is_gated
        width = (out_features or packed.out_features // 2) if gated else packed.out_features
        if out is None:
            out = torch.empty(num_tokens, width, dtype=packed.dtype if gated else torch.float32)
        _check_code(
            self.functions.shoal_linear(
                TYPE_IDS[packed.dtype],
                torch.get_num_threads(),
                pointer(packed.weight),
                pointer(packed.bias),
                packed.out_features,
                packed.in_features,
                packed.format,
                packed.group_size,
                pointer(packed.columns),
                epilogue,
                pointer(states, packed.dtype),
                num_tokens,
                pointer(out),
                width,
            )
        )
        return out

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """RMS norm of float32 ``hidden`` [num_tokens, hidden_size], rounded once, to ``dtype``."""
        out = torch.empty_like(hidden, dtype=dtype)
        self.functions.shoal_rms_norm(
            TYPE_IDS[dtype],
            pointer(hidden, torch.float32),
            pointer(weight, torch.float32),
            eps,
            *hidden.shape,
            pointer(out),
        )
        return out

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        inv_freq: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: LayerCache,
        heads: AttentionHeads,
        dtype: torch.dtype,
        norms: HeadNorms | None = None,
        new_keys: NewKeys = NewKeys.OWN,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys; write keys and values to the cache; return the queries.

        ``qkv`` float32 [num_tokens, as ``new_keys`` says]. The first 2 * len(inv_freq) features of
        a head are rotated, with cosines and sines times ``factor``. Returns [num_tokens, num_heads,
        head_dim] in ``dtype``.
        """
        check_cache(cache, dtype)
        num_tokens = qkv.shape[0]
        query = torch.empty(num_tokens, heads.num_heads, heads.head_dim, dtype=dtype)
        plan_heads = PlanHeads.of(heads, 2 * len(inv_freq), norms, new_keys)
        cache_arguments = _cache_arguments(cache)
        _check_code(
            self.functions.shoal_rotate_and_write(
                TYPE_IDS[dtype],
                pointer(qkv, torch.float32),
                pointer(positions, torch.int64),
                pointer(inv_freq, torch.float32),
                factor,
                pointer(slot_mapping, torch.int64),
                num_tokens,
                ctypes.addressof(plan_heads),
                pointer(query),
                ctypes.addressof(cache_arguments),
            )
        )
        return query

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        block_tables: torch.Tensor,
        query_lens: list[int],
        context_lens: list[int],
        heads: AttentionHeads,
        block_mass: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention as the reference's ``paged_attention``; returns the query's shape.

        To ``block_mass``, int64 [num_seqs, max_blocks], is added the attention that each block got,
        over this call's queries and heads (see ``attention_mass``).
        """
        check_cache(cache, query.dtype)
        assert query.shape[1:] == (heads.num_heads, heads.head_dim)
        out = torch.empty_like(query)
        lens = torch.tensor([query_lens, context_lens], dtype=torch.int64)
        plan_heads, cache_arguments = PlanHeads.of(heads), _cache_arguments(cache)
        batch = BatchArguments(
            *block_tables.shape,
            cache.block_size,
            pointer(block_tables, torch.int64),
            pointer(lens[0]),
            pointer(lens[1]),
        )
        _check_code(
            self.functions.shoal_attention(
                TYPE_IDS[query.dtype],
                torch.get_num_threads(),
                pointer(query),
                ctypes.addressof(cache_arguments),
                ctypes.addressof(batch),
                ctypes.addressof(plan_heads),
                pointer(out),
                pointer(block_mass, torch.int64),
            )
        )
        return out

    def sample(self, logits: torch.Tensor, params: "list[SampleParams]") -> list[int]:
        """A token for each row of float32 ``logits`` [num_rows, vocab_size].

        -1 stands for a row whose best logit is NaN or infinite. As ``backend/sampler.py`` says, but
        for the last bits of float sums: about one draw in a million falls on a neighbouring token.
        """
        assert len(logits) == len(params)
        tokens = torch.empty(len(params), dtype=torch.int64)
        rows = (SampleParams * len(params))(*params)
        _check_code(
            self.functions.shoal_sample(
                min(torch.get_num_threads(), len(params)),
                pointer(logits, torch.float32),
                *logits.shape,
                ctypes.addressof(rows),
                pointer(tokens),
            )
        )
        return tokens.tolist()

    def mask(self, logits: torch.Tensor, rows: "list[int]", masks: torch.Tensor) -> None:
        """Set to -inf, in place, what the masks leave out in these rows of float32 ``logits``
        [num_rows, vocab_size]. ``masks``: int32 [len(rows), (vocab_size + 31) // 32], a bit a
        token, the lowest first."""
        vocab_size = logits.shape[1]
        indices = torch.tensor(rows, dtype=torch.int64)
        assert masks.shape == (len(rows), (vocab_size + 31) // 32)
        _check_code(
            self.functions.shoal_mask(
                min(torch.get_num_threads(), len(rows)),
                pointer(logits, torch.float32),
                vocab_size,
                pointer(indices),
                len(rows),
                pointer(masks, torch.int32),
            )
        )


class SampleParams(ctypes.Structure):
    """How a row is sampled; as in ``native/sample.h``."""

    _fields_ = [
        ("temperature", ctypes.c_float),  # 0: the likeliest token
        ("reserved", ctypes.c_float),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("random_bits", ctypes.c_int64),
    ]


def _cache_arguments(cache: LayerCache) -> CacheArguments:
    return CacheArguments(
        STORED_IDS[cache.keys.dtype],
        cache.keys_in_panels,
        pointer(cache.keys),
        pointer(cache.values),
        pointer(cache.key_scales, torch.float32),
        pointer(cache.value_scales, torch.float32),
    )


def pointer(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> int | None:
    """The address of a tensor's data. Raises ValueError for one that the kernels cannot read."""
    if tensor is None:
        return None
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("the native kernels need contiguous tensors on the CPU")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"the native kernels need {dtype} here, not {tensor.dtype}")
    return tensor.data_ptr()


def _check_code(code: int) -> None:
    if code:
        raise MemoryError("the native kernels ran out of memory")


def _flat(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(num_elements, dtype=dtype)


def _wide(bias: torch.Tensor | None) -> torch.Tensor | None:
    """float32, padded so that the kernels may read whole panels."""
    if bias is None:
        return None
    padding = -len(bias) % PANEL
    return torch.nn.functional.pad(bias.float(), (0, padding)).contiguous()


def _interleaved_rows(num_rows: int) -> torch.Tensor:
    """Which rows of gate and up, joined, come after each other: 16 of gate, 16 of up, and so on.
    Rows that fill up the last 16 are copies whose products nobody stores."""
    half = PANEL // 2
    rows = torch.arange(-(-num_rows // half) * half).clamp(max=num_rows - 1).view(-1, 1, half)
    return torch.cat([rows, rows + num_rows], dim=1).flatten()


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[n, ...] twice to [2 * n padded to 16, ...]: 16 of gate, 16 of up, and so on."""
    half = PANEL // 2
    num_groups = -(-gate.shape[0] // half)
    out = gate.new_zeros(num_groups, 2, half, *gate.shape[1:])
    for idx, part in enumerate((gate, up)):
        padded = part.new_zeros(num_groups * half, *part.shape[1:])
        padded[: part.shape[0]] = part
        out[:, idx] = padded.view(out[:, idx].shape)
    return out.flatten(0, 2)
