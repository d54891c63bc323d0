"""Quantised weights in the order in which the native kernels read them: ``native/quantized.h``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.nn import functional

from shoal.kernels.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    unpack_int4,
)

PANEL = 32  # output features side by side
# Sums of products of two bytes stay within 32 bits up to here.
MAX_INT8_FEATURES = 65536
_FP8_NAN = 0x7F
W = TypeVar("W", bound=QuantizedWeight)
_SLICE_ELEMENTS = 2**18  # packed at a time


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight's bytes, panel after panel."""

    values: torch.Tensor  # uint8, flat
    format: str  # a name of native_library.PackedFormat
    group_size: int = 0
    columns: torch.Tensor | None = None


def _flat_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def pack_panels(
    weight: QuantizedWeight, empty: Callable[[int], torch.Tensor] = _flat_bytes
) -> Panels | None:
    """The weight for the native kernels, or None where they have no product for it.

    ``empty`` gives the memory, flat and in bytes. Little more is held meanwhile.
    """
    if isinstance(weight, Int8Weight) and weight.in_features <= MAX_INT8_FEATURES:
        return Panels(_by_slices(weight, _pack_int8, empty), "INT8")
    if isinstance(weight, Int4Weight):
        one_group = weight.group_size >= weight.in_features
        if not one_group and weight.group_size % 8:
            return None
        is_short = _fits_short_heads(weight)
        panels = _by_slices(weight, lambda rows: _pack_int4(rows, is_short), empty)
        group_size = min(weight.group_size, -(-weight.in_features // 8) * 8)
        kind = "INT4_SHORT" if is_short else "INT4"
        return Panels(panels, kind, group_size, weight.columns)
    if isinstance(weight, Fp8Weight):
        values = weight.values.view(torch.uint8)
        if any(bool((rows & 127 == _FP8_NAN).any()) for rows in values.split(_slice_rows(weight))):
            return None
        return Panels(_by_slices(weight, _pack_fp8, empty), "FP8")
    return None


def _slice_rows(weight: QuantizedWeight) -> int:
    """Output features that are packed at a time: whole panels."""
    return max(1, _SLICE_ELEMENTS // weight.in_features // PANEL) * PANEL


def _by_slices(
    weight: W, pack: Callable[[W], torch.Tensor], empty: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """What ``pack`` makes of all rows, [panels, bytes], as flat bytes."""
    step = _slice_rows(weight)
    num_panels = -(-weight.out_features // PANEL)
    whole = None
    for first in range(0, weight.out_features, step):
        part = pack(weight.cut(first, first + step))
        if whole is None:
            whole = empty(num_panels * part.shape[1]).view(num_panels, -1)
        whole[first // PANEL : first // PANEL + len(part)] = part
    assert whole is not None
    return whole.flatten()


def _pack_int8(weight: Int8Weight) -> torch.Tensor:
    # Offset by 128: the instruction multiplies unsigned bytes by signed ones.
    values = weight.values.view(torch.uint8) ^ 128
    return _with_scales(_by_panel(values, 4, fill=128), weight.scales)


def _pack_fp8(weight: Fp8Weight) -> torch.Tensor:
    return _with_scales(_by_panel(weight.values.view(torch.uint8), 2), weight.scales)


def _fits_short_heads(weight: Int4Weight) -> bool:
    is_exact = torch.equal(weight.scales.bfloat16().float(), weight.scales.float())
    return is_exact and (weight.zeros is None or int(weight.zeros.max()) < 16)


def _pack_int4(weight: Int4Weight, is_short: bool) -> torch.Tensor:
    values = unpack_int4(weight.values, weight.in_features)
    octets = functional.pad(values, (0, -values.shape[1] % 8)).view(len(values), -1, 8)
    words = octets[..., :4] | (octets[..., 4:] << 4)  # [n, octets, 4]
    body = _by_panel(words.flatten(1), 4)
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full_like(weight.scales, 8, dtype=torch.uint8)
    scales = weight.scales
    heads = _short_heads(scales.bfloat16(), zeros) if is_short else _long_heads(scales, zeros)
    return torch.cat([heads, body], dim=1)


def _short_heads(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Scales in bfloat16 and zero points below 16, both [n, groups], by panel."""
    padded = functional.pad(zeros, (0, -zeros.shape[1] % 4))
    pairs = padded[:, ::2] | (padded[:, 1::2] << 4)
    by_column = scales.contiguous().view(torch.uint8)
    return torch.cat([_by_panel(by_column, 2), _by_panel(pairs, 1)], dim=1)


def _long_heads(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The same by panel in words: a scale's bits with the zero point in the lowest eight, which no
    scale of 16 bits uses; one of 32 bits is rounded to them."""
    bits = (scales.float().contiguous().view(torch.int32).long() + 128) & ~255
    words = (bits | zeros.long()).to(torch.int32)
    return _by_panel(words.view(torch.uint8), 4)


def _by_panel(values: torch.Tensor, side_by_side: int, fill: int = 0) -> torch.Tensor:
    """uint8 [n, k] to [panels, bytes]: within a panel [k / side_by_side][32][side_by_side]."""
    padding = (0, -values.shape[1] % side_by_side, 0, -values.shape[0] % PANEL)
    padded = functional.pad(values, padding, value=fill)
    tiles = padded.view(-1, PANEL, padded.shape[1] // side_by_side, side_by_side)
    return tiles.transpose(1, 2).flatten(1)


def _with_scales(panels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Each panel followed by its columns' float32 scales."""
    padded = functional.pad(scales.float(), (0, -len(scales) % PANEL))
    return torch.cat([panels, padded.view(-1, PANEL).view(torch.uint8)], dim=1)
