"""An output projection's second copy, in 8 bits, which says which tokens can be the likeliest.

``native/screened_head.h`` has the method. It spares a greedy step most of the projection, and gives
the very token that all logits would.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from shoal.kernels.huge_pages import huge_empty
from shoal.kernels.native_library import PackedFormat, PackedLinear
from shoal.kernels.quantized_panels import PANEL, pack_panels
from shoal.kernels.quantized_weights import STATE_GROUP, Int8Weight

LEAST_TOKENS = 8192  # a smaller vocabulary's projection is too small a part of a step
LEAST_COLUMNS = 64  # a row of fewer logits has no room for what bounds them
BOUND_PARTS = 3  # as in native/screened_head.h
_CHUNK = 128 * PANEL  # rows that are looked at together
_ROUNDING = 1 + 1e-5  # of norms summed in float32


@dataclass(frozen=True, slots=True)
class ScreenedHead:
    """The copy, and the bounds of its columns."""

    packed: PackedLinear  # of 8 bits
    # float32 [2, BOUND_PARTS, columns of the panels]: norms of w - w' and of w' by part of features
    bounds: torch.Tensor


def screen_head(weight: torch.Tensor) -> ScreenedHead | None:
    """Of a dense ``weight`` [vocab_size, hidden_size]; None where it would not pay, or where the
    weight holds what is no finite number."""
    vocab_size, width = weight.shape
    if vocab_size < LEAST_TOKENS:
        return None
    num_panels = -(-vocab_size // PANEL)
    bounds = torch.zeros(2, BOUND_PARTS, num_panels * PANEL)
    panels = huge_empty([num_panels, (width + 3) // 4 * 4 * PANEL + 4 * PANEL], torch.uint8)
    for first in range(0, vocab_size, _CHUNK):
        rows = weight[first : first + _CHUNK].float()
        if not bool(rows.isfinite().all()):
            return None
        # The least normal number: a row of zeros has a scale, too.
        scales = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        values = (rows / scales[:, None]).round().clamp(-127, 127)
        near = values * scales[:, None]
        for part, features in enumerate(bound_parts(width)):
            columns = slice(first, first + len(rows))
            bounds[0, part, columns] = (rows - near)[:, features].norm(dim=1) * _ROUNDING
            bounds[1, part, columns] = near[:, features].norm(dim=1) * _ROUNDING
        packed = pack_panels(Int8Weight(values.to(torch.int8), scales, weight.dtype))
        if packed is None:
            return None
        part = packed.values.view(-1, panels.shape[1])
        panels[first // PANEL : first // PANEL + len(part)] = part
    linear = PackedLinear(
        panels.flatten(), None, vocab_size, width, weight.dtype, PackedFormat.INT8
    )
    return ScreenedHead(linear, bounds)


def bound_parts(width: int) -> list[slice]:
    """The features of each part: whole groups of states."""
    num_groups = -(-width // STATE_GROUP)
    starts = [-(-part * num_groups // BOUND_PARTS) * STATE_GROUP for part in range(BOUND_PARTS + 1)]
    return [slice(*ends) for ends in pairwise(starts)]
