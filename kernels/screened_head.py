"""An output projection's second copy, in 8 bits, which says which tokens can be the likeliest.

``native/screened_head.h`` has the method. It spares a greedy step most of the projection, and gives
the very token that all logits would.
"""

from dataclasses import dataclass

import torch

from shoal.kernels.huge_pages import huge_empty
from shoal.kernels.native_library import PackedFormat, PackedLinear
from shoal.kernels.quantized_panels import PANEL, pack_panels
from shoal.kernels.quantized_weights import Int8Weight

LEAST_TOKENS = 8192  # a smaller vocabulary's projection is too small a part of a step
_CHUNK = 128 * PANEL  # rows that are looked at together
_ROUNDING = 1 + 1e-5  # of norms summed in float32


@dataclass(frozen=True, slots=True)
class ScreenedHead:
    """The copy, and the bounds of its columns."""

    packed: PackedLinear  # of 8 bits
    bounds: torch.Tensor  # float32 [2, columns of the panels]: norms of w - w' and of w'


def screen_head(weight: torch.Tensor) -> ScreenedHead | None:
    """Of a dense ``weight`` [vocab_size, hidden_size]; None where it would not pay, or where the
    weight holds what is no finite number."""
    vocab_size, width = weight.shape
    if vocab_size < LEAST_TOKENS:
        return None
    num_panels = -(-vocab_size // PANEL)
    bounds = torch.zeros(2, num_panels * PANEL)
    panels = huge_empty([num_panels, (width + 3) // 4 * 4 * PANEL + 4 * PANEL], torch.uint8)
    for first in range(0, vocab_size, _CHUNK):
        rows = weight[first : first + _CHUNK].float()
        if not bool(rows.isfinite().all()):
            return None
        # The least normal number: a row of zeros has a scale, too.
        scales = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        values = (rows / scales[:, None]).round().clamp(-127, 127)
        near = values * scales[:, None]
        bounds[0, first : first + len(rows)] = (rows - near).norm(dim=1) * _ROUNDING
        bounds[1, first : first + len(rows)] = near.norm(dim=1) * _ROUNDING
        packed = pack_panels(Int8Weight(values.to(torch.int8), scales, weight.dtype))
        if packed is None:
            return None
        part = packed.values.view(-1, panels.shape[1])
        panels[first // PANEL : first // PANEL + len(part)] = part
    linear = PackedLinear(
        panels.flatten(), None, vocab_size, width, weight.dtype, PackedFormat.INT8
    )
    return ScreenedHead(linear, bounds)
