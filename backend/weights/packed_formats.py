"""Checkpoints whose weights are quantised already: AWQ, GPTQ and compressed-tensors.

A module's tensors (``x.qweight``, ``x.scales`` ...) become one weight, ``x.weight``, in the format
of ours that holds the same values; where none does, the dense tensor that they stand for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.backend.engine_config import ConfigError
from shoal.kernels.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    Weight,
    pack_int4,
)

METHODS = ("awq", "gptq", "compressed-tensors")
_PACKED_FORMATS = ("pack-quantized",)
_PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
# AWQ interleaves the eight values of a word: where value i of a row is found.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Tensors = Mapping[str, torch.Tensor]  # of one module, by the last part of their names
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the checkpoint's quantised modules are stored. ``main`` is the tensor that a module has
    if it is quantised; ``parts`` may come beside it."""

    main: str
    parts: tuple[str, ...]
    required: tuple[str, ...]
    shape: Callable[[Shape], Shape]  # from main's to the dense weight's; the columns at most
    decode: Callable[[Tensors, torch.dtype], Weight]


def packed_format(config: Mapping[str, Any] | None) -> PackedFormat | None:
    """The format that ``quantization_config`` in config.json describes. Raises ConfigError."""
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method == "awq":
        return _awq(config)
    if method == "gptq":
        return _gptq(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    raise ConfigError(
        f"quantization_config: quant_method {str(method)[:40]!r} is not read. "
        f"Supported: {', '.join(METHODS)}, and GGUF."
    )


# --- AWQ ------------------------------------------------------------------------------------------


def _awq(config: Mapping[str, Any]) -> PackedFormat:
    _check(config, "bits", 4)
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ConfigError("quantization_config: version must be gemm.")
    group_size = _group_size(config.get("group_size", 128))

    def decode(tensors: Tensors, dtype: torch.dtype) -> Weight:
        values = _unpack_columns(tensors["qweight"], _AWQ_ORDER)  # [in, out]
        zeros = _unpack_columns(tensors["qzeros"], _AWQ_ORDER)  # [groups, out]
        return _int4(values.t(), tensors["scales"].t(), zeros.t(), group_size, dtype)

    return PackedFormat(
        "qweight",
        ("qzeros", "scales"),
        ("qzeros", "scales"),
        lambda shape: (shape[1] * 8, shape[0]),
        decode,
    )


# --- GPTQ -----------------------------------------------------------------------------------------


def _gptq(config: Mapping[str, Any]) -> PackedFormat:
    _check(config, "bits", 4)
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ConfigError("quantization_config: checkpoint_format must be gptq or gptq_v2.")
    # The first packing stores zero points less one.
    offset = 1 if form == "gptq" else 0
    group_size = _group_size(config.get("group_size", 128))

    def decode(tensors: Tensors, dtype: torch.dtype) -> Weight:
        values = _unpack_columns(tensors["qweight"].t().contiguous())  # [out, in]
        zeros = _unpack_columns(tensors["qzeros"]).t() + offset  # [out, groups]
        scales = tensors["scales"].t()
        groups = tensors.get("g_idx")
        if groups is None:
            return _int4(values, scales, zeros, group_size, dtype)
        return _by_group_index(values, scales, zeros, groups.long(), group_size, dtype)

    return PackedFormat(
        "qweight",
        ("qzeros", "scales", "g_idx"),
        ("qzeros", "scales"),
        lambda shape: (shape[1], shape[0] * 8),
        decode,
    )


def _by_group_index(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor,
    group_size: int,
    dtype: torch.dtype,
) -> Weight:
    """Columns that name their groups, as act-order leaves them: sorted by group, so that groups
    are neighbours again."""
    if groups.shape != (values.shape[1],) or not _within(groups, scales.shape[1]):
        raise ConfigError("g_idx does not fit the weight")
    order = torch.argsort(groups, stable=True)
    size = min(group_size, values.shape[1])
    if torch.equal(groups[order], torch.arange(len(groups)) // size):
        weight = _int4(values[:, order], scales, zeros, group_size, dtype)
        in_order = torch.equal(order, torch.arange(len(order)))
        packed = isinstance(weight, Int4Weight)
        return replace(weight, columns=order) if packed and not in_order else weight
    # Groups of uneven sizes: no packed form here.
    return ((values.short() - zeros.short()[:, groups]) * scales.float()[:, groups]).to(dtype)


# --- compressed-tensors ---------------------------------------------------------------------------


def _compressed_tensors(config: Mapping[str, Any]) -> PackedFormat:
    """https://github.com/vllm-project/compressed-tensors: one group of settings for all modules."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConfigError("quantization_config: config_groups must hold exactly one group.")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError("quantization_config: config_groups has no weights.")
    form = group.get("format") or config.get("format")
    if form in _PACKED_FORMATS:
        return _pack_quantized(weights)
    if form in _PLAIN_FORMATS:
        return _plain_quantized(weights)
    raise ConfigError(
        f"quantization_config: format {str(form)[:40]!r} is not read. "
        f"Supported: {', '.join(_PACKED_FORMATS + _PLAIN_FORMATS)}."
    )


def _pack_quantized(weights: Mapping[str, Any]) -> PackedFormat:
    _check(weights, "num_bits", 4)
    _check(weights, "type", "int")
    group_size = _group_size(weights.get("group_size") or -1)
    symmetric = weights.get("symmetric", True)

    def decode(tensors: Tensors, dtype: torch.dtype) -> Weight:
        shape = tensors["weight_shape"].tolist()
        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        if len(shape) != 2 or shape[0] != len(packed) or not 0 < shape[1] <= packed.shape[1] * 8:
            raise ConfigError("weight_shape does not fit the packed weight")
        values = _unpack_columns(packed)[:, : shape[1]]
        zeros = None
        if not symmetric:
            if "weight_zero_point" not in tensors:
                raise ConfigError("weight_zero_point is missing")
            stored = tensors["weight_zero_point"].t().contiguous()
            zeros = _unpack_columns(stored)[:, : shape[0]].t()
        groups = tensors.get("weight_g_idx")
        if groups is not None and bool((groups >= 0).all()):
            full = torch.full_like(scales, 8, dtype=torch.uint8) if zeros is None else zeros
            return _by_group_index(values, scales, full, groups.long(), group_size, dtype)
        return _int4(values, scales, zeros, group_size, dtype)

    return PackedFormat(
        "weight_packed",
        ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        ("weight_scale", "weight_shape"),
        lambda shape: (shape[0], shape[1] * 8),
        decode,
    )


def _plain_quantized(weights: Mapping[str, Any]) -> PackedFormat:
    _check(weights, "num_bits", 8)
    symmetric = weights.get("symmetric", True)

    def decode(tensors: Tensors, dtype: torch.dtype) -> Weight:
        values, scales = tensors["weight"], tensors["weight_scale"].float()
        if values.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ConfigError(f"weight has type {str(values.dtype).removeprefix('torch.')}")
        zeros = tensors.get("weight_zero_point")
        rows = len(values)
        if scales.numel() not in (1, rows):
            return _grouped_dense(values, scales, None if symmetric else zeros, dtype)
        by_row = scales.flatten().expand(rows).contiguous()
        if not symmetric and zeros is not None and bool(zeros.any()):
            return _grouped_dense(values, by_row[:, None], zeros.view(-1, 1).expand(rows, 1), dtype)
        if values.dtype == torch.int8:
            return Int8Weight(values, by_row, dtype)
        return Fp8Weight(values, by_row, dtype)

    return PackedFormat(
        "weight",
        ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point"),
        ("weight_scale",),
        lambda shape: shape,
        decode,
    )


def _grouped_dense(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Eight bits with groups along a row, for which there is no packed form here."""
    if scales.dim() != 2 or len(scales) != len(values) or values.shape[1] % scales.shape[1]:
        raise ConfigError("weight_scale does not fit the weight")
    size = values.shape[1] // scales.shape[1]
    wide = values.float()
    if zeros is not None:
        wide = wide - zeros.float().repeat_interleave(size, dim=1)
    return (wide * scales.repeat_interleave(size, dim=1)).to(dtype)


# --- shared ---------------------------------------------------------------------------------------


def module_of(name: str, form: PackedFormat) -> tuple[str, str] | None:
    """A tensor's module and part, if its name can belong to a quantised one."""
    stem, _, part = name.rpartition(".")
    return (stem, part) if part == form.main or part in form.parts else None


def _int4(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> QuantizedWeight:
    rows, columns = values.shape
    size = min(group_size, columns)
    shape = (rows, -(-columns // size))
    if scales.shape != shape or (zeros is not None and zeros.shape != shape):
        raise ConfigError(f"scales and zero points must have shape {list(shape)}")
    kept = None if zeros is None else zeros.contiguous()
    return Int4Weight(
        pack_int4(values.contiguous()), scales.contiguous(), kept, size, columns, dtype
    )


def _unpack_columns(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [n, k / 8] to uint8 [n, k]: value i of a word lies at bits 4 * order[i]."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ConfigError("packed values must be an int32 matrix")
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _within(indices: torch.Tensor, count: int) -> bool:
    return bool(((indices >= 0) & (indices < count)).all())


def _group_size(value: Any) -> int:
    """-1 means the whole row."""
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value > 0):
        raise ConfigError("quantization_config: group_size must be -1 or above 0.")
    return value if value > 0 else 2**62


def _check(config: Mapping[str, Any], name: str, wanted: Any) -> None:
    if config.get(name, wanted if name == "type" else None) != wanted:
        raise ConfigError(
            f"quantization_config: {name} {str(config.get(name))[:20]} is not read here, "
            f"only {wanted}."
        )
