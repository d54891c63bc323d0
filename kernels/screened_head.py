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
LEAST_COLUMNS = 64  # a row of fewer logits has no room for what bounds them
LARGEST_NORM = 1e15  # of a token's weights: no bound overflows
_CHUNK = 128 * PANEL  # rows that are looked at together
_ROUNDING = 1 + 1e-5  # of norms summed in float32


@dataclass(frozen=True, slots=True)
class ScreenedHead:
    """The copy. Its panels are those of 8 bits, and after each float32 [2, PANEL]: the norms of
    w - w' and of w' of its columns, w' being what the bytes stand for."""

    packed: PackedLinear


def screen_head(weight: torch.Tensor) -> ScreenedHead | None:
    """Of a dense ``weight`` [vocab_size, hidden_size]; None where it would not pay, or where the
    weight holds what is no finite number or far too large a one."""
    vocab_size, width = weight.shape
    if vocab_size < LEAST_TOKENS:
        return None
    num_panels = -(-vocab_size // PANEL)
    own_bytes = ((width + 3) // 4 * 4 + 4) * PANEL
    panels = huge_empty([num_panels, own_bytes + 2 * 4 * PANEL], torch.uint8)
    for first in range(0, vocab_size, _CHUNK):
        rows = weight[first : first + _CHUNK].float()
        if not bool((rows.norm(dim=1) < LARGEST_NORM).all()):
            return None
        # The least normal number: a row of zeros has a scale, too.
        scales = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        values = (rows / scales[:, None]).round().clamp(-127, 127)
        near = values * scales[:, None]
        packed = pack_panels(Int8Weight(values.to(torch.int8), scales, weight.dtype))
        if packed is None:
            return None
        part = panels[first // PANEL : -(-(first + len(rows)) // PANEL)]
        part[:, :own_bytes] = packed.values.view(len(part), own_bytes)
        norms = torch.zeros(2, len(part) * PANEL)
        norms[0, : len(rows)] = (rows - near).norm(dim=1) * _ROUNDING
        norms[1, : len(rows)] = near.norm(dim=1) * _ROUNDING
        by_panel = norms.view(2, len(part), PANEL).transpose(0, 1).flatten(1)
        part[:, own_bytes:] = by_panel.contiguous().view(torch.uint8)
    return ScreenedHead(
        PackedLinear(panels.flatten(), None, vocab_size, width, weight.dtype, PackedFormat.INT8)
    )
