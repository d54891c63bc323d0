"""Quantising a dense weight, without data to calibrate on: what ``quantization`` in the settings
and ``shoal quantize`` do."""

import itertools
from collections.abc import Callable
from functools import partial

import torch

from shoal.kernels.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    pack_int4,
)

INT4_GROUP = 128
INT4_FINE_GROUP = 64  # where the plan finds room for it
FP8_MAX = 448.0  # the largest float8_e4m3fn
_CHUNK_ELEMENTS = 2**18  # worked on at a time, in float32: 1 MiB, which caches hold
# What is tried for int4, of a group's range and of its zero point. A narrower range leaves less
# squared error but costs more perplexity: the largest weights matter most.
_STRETCHES = (1.0, 1.025, 1.05, 1.075)
_ZERO_SHIFTS = (0, -1, 1)
# Scales tried for fp8, in parts of the least that holds a row: at most twice, where all repeats.
_FP8_STRETCHES = tuple(2 ** (step / 8) for step in range(8))


def quantize_int8(weight: torch.Tensor, dtype: torch.dtype) -> Int8Weight:
    """Each output feature by its own largest magnitude."""

    def chunk(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = _nonzero(rows.abs().amax(1) / 127.0)
        return (rows / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales

    values, scales = _by_chunks(weight, chunk)
    return Int8Weight(values, scales, dtype)


def quantize_fp8(weight: torch.Tensor, dtype: torch.dtype) -> Fp8Weight:
    """Each output feature with the scale that leaves the least squared error, none being cut."""

    def chunk(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        least = _nonzero(rows.abs().amax(1) / FP8_MAX)
        best, best_scales = torch.full_like(least, torch.inf), least
        for stretch in _FP8_STRETCHES:
            scales = least * stretch
            restored = _to_fp8(rows, scales).float() * scales[:, None]
            error = (restored - rows).square().sum(1)
            best_scales = torch.where(error < best, scales, best_scales)
            best = torch.minimum(error, best)
        return _to_fp8(rows, best_scales).view(torch.uint8), best_scales

    values, scales = _by_chunks(weight, chunk)
    return Fp8Weight(values.view(torch.float8_e4m3fn), scales, dtype)


def quantize_int4(
    weight: torch.Tensor,
    dtype: torch.dtype,
    group_size: int = INT4_GROUP,
    symmetric: bool = False,
) -> Int4Weight:
    """Each group of ``group_size`` input features with the scale and zero point that leave the
    least squared error among some ranges at and above its own. ``symmetric``: the zero point is 8.
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
    "int4_fine": partial(quantize_int4, group_size=INT4_FINE_GROUP),
    "fp8": quantize_fp8,
}


def _by_chunks(
    weight: torch.Tensor, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """Some rows at a time, so that little is held beside the weight and what becomes of it."""
    num_rows = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    whole: list[torch.Tensor] = []
    for first in range(0, len(weight), num_rows):
        parts = quantize(weight[first : first + num_rows].float())
        if not whole:
            whole = [part.new_empty((len(weight), *part.shape[1:])) for part in parts]
        for tensor, part in zip(whole, parts, strict=True):
            tensor[first : first + num_rows] = part
    return tuple(whole)


def _to_fp8(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (rows / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


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
    for stretch, shift in itertools.product(_STRETCHES, (0,) if symmetric else _ZERO_SHIFTS):
        scales = _nonzero((high - low) * (stretch / 15.0)).to(torch.bfloat16)
        zeros = (-low * stretch / scales.float()).round().add(shift).clamp(0, 15)
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
