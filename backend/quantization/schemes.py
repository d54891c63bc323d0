"""Quantising a dense weight, without data to calibrate on: what ``quantization`` in the settings
and ``shoal quantize`` do."""

from collections.abc import Callable

import torch

from shoal.kernels.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    pack_int4,
)

INT4_GROUP = 128
FP8_MAX = 448.0  # the largest float8_e4m3fn
_CHUNK_ELEMENTS = 2**24  # worked on at a time, in float32
_SHRINKS = tuple(1.0 - 0.025 * step for step in range(13))  # of a group's range, tried for int4


def quantize_int8(weight: torch.Tensor, dtype: torch.dtype) -> Int8Weight:
    """Each output feature by its own largest magnitude."""

    def chunk(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = _nonzero(rows.abs().amax(1) / 127.0)
        return (rows / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales

    values, scales = _by_chunks(weight, chunk)
    return Int8Weight(values, scales, dtype)


def quantize_fp8(weight: torch.Tensor, dtype: torch.dtype) -> Fp8Weight:
    """Each output feature's largest magnitude becomes the largest float8."""

    def chunk(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = _nonzero(rows.abs().amax(1) / FP8_MAX)
        scaled = (rows / scales[:, None]).clamp(-FP8_MAX, FP8_MAX)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales

    values, scales = _by_chunks(weight, chunk)
    return Fp8Weight(values.view(torch.float8_e4m3fn), scales, dtype)


def quantize_int4(
    weight: torch.Tensor,
    dtype: torch.dtype,
    group_size: int = INT4_GROUP,
    symmetric: bool = False,
) -> Int4Weight:
    """Each group of ``group_size`` input features with the scale and zero point that leave the
    least squared error among some ranges at and below its own. ``symmetric``: the zero point is 8.
    """

    def chunk(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups, present = _grouped(rows, group_size)
        scales, zeros = _best_grid(groups, present, symmetric)
        steps = _int4_steps(groups, scales.float(), zeros)
        values = steps.flatten(1)[:, : rows.shape[1]].to(torch.uint8)
        return pack_int4(values), scales, zeros.to(torch.uint8)

    values, scales, zeros = _by_chunks(weight, chunk)
    return Int4Weight(values, scales, zeros, group_size, weight.shape[1], dtype)


SCHEMES: dict[str, Callable[[torch.Tensor, torch.dtype], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
}


def _by_chunks(
    weight: torch.Tensor, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """Some rows at a time, so that little is held in float32."""
    num_rows = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    parts = [quantize(rows.float()) for rows in weight.split(num_rows)]
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales > 0, scales, 1.0)


def _grouped(rows: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, num_groups, group_size], a short last group filled with zeros, and where values are."""
    padding = -rows.shape[1] % group_size
    shape = (-1, (rows.shape[1] + padding) // group_size, group_size)
    present = torch.nn.functional.pad(torch.ones(1, rows.shape[1]), (0, padding))
    return torch.nn.functional.pad(rows, (0, padding)).view(shape), present.view(shape)


def _best_grid(
    groups: torch.Tensor, present: torch.Tensor, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in bfloat16 and zero points (float, whole), both [n, num_groups]."""
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    best = torch.full_like(low, torch.inf)
    best_scales = torch.ones_like(low, dtype=torch.bfloat16)
    best_zeros = torch.zeros_like(low)
    for shrink in _SHRINKS:
        scales = _nonzero((high - low) * (shrink / 15.0)).to(torch.bfloat16)
        zeros = (-low * shrink / scales.float()).round().clamp(0, 15)
        if symmetric:
            zeros = torch.full_like(zeros, 8)
        steps = _int4_steps(groups, scales.float(), zeros)
        restored = (steps - zeros[..., None]) * scales.float()[..., None]
        error = ((restored - groups).square() * present).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        best_scales = torch.where(better, scales, best_scales)
        best_zeros = torch.where(better, zeros, best_zeros)
    return best_scales, best_zeros


def _int4_steps(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
