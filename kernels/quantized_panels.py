"""Quantised weights in the order in which the native kernels read them: ``native/quantized.h``."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight's bytes, panel after panel."""

    values: torch.Tensor  # uint8, flat
    format: str  # a name of native_library.PackedFormat
    group_size: int = 0
    columns: torch.Tensor | None = None


def pack_panels(weight: QuantizedWeight) -> Panels | None:
    """The weight for the native kernels, or None where they have no product for it."""
    if isinstance(weight, Int8Weight) and weight.in_features <= MAX_INT8_FEATURES:
        return _pack_int8(weight)
    if isinstance(weight, Int4Weight):
        one_group = weight.group_size >= weight.in_features
        return _pack_int4(weight) if one_group or weight.group_size % 8 == 0 else None
    if isinstance(weight, Fp8Weight):
        values = weight.values.view(torch.uint8)
        return None if bool((values & 127 == _FP8_NAN).any()) else _pack_fp8(weight)
    return None


def _pack_int8(weight: Int8Weight) -> Panels:
    # Offset by 128: the instruction multiplies unsigned bytes by signed ones.
    values = weight.values.view(torch.uint8) ^ 128
    return Panels(_with_scales(_by_panel(values, 4, fill=128), weight.scales), "INT8")


def _pack_fp8(weight: Fp8Weight) -> Panels:
    values = weight.values.view(torch.uint8)
    return Panels(_with_scales(_by_panel(values, 2), weight.scales), "FP8")


def _pack_int4(weight: Int4Weight) -> Panels:
    values = unpack_int4(weight.values, weight.in_features)
    octets = functional.pad(values, (0, -values.shape[1] % 8)).view(len(values), -1, 8)
    words = octets[..., :4] | (octets[..., 4:] << 4)  # [n, octets, 4]
    body = _by_panel(words.flatten(1), 4)
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full_like(weight.scales, 8, dtype=torch.uint8)
    scales = weight.scales.bfloat16()
    is_short = torch.equal(scales.float(), weight.scales.float()) and int(zeros.max()) < 16
    heads = _short_heads(scales, zeros) if is_short else _long_heads(weight.scales, zeros)
    group_size = min(weight.group_size, -(-weight.in_features // 8) * 8)
    kind = "INT4_SHORT" if is_short else "INT4"
    return Panels(torch.cat([heads, body], dim=1).flatten(), kind, group_size, weight.columns)


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
    """Each panel followed by its columns' float32 scales, as flat bytes."""
    padded = functional.pad(scales.float(), (0, -len(scales) % PANEL))
    return torch.cat([panels, padded.view(-1, PANEL).view(torch.uint8)], dim=1).flatten()
