"""What the native plans of all models share."""

import torch

from shoal.backend.forward_batch import ForwardBatch, KnownStates
from shoal.backend.models.layers import Linear
from shoal.kernels.huge_pages import huge_empty
from shoal.kernels.native_heads import AttentionHeads
from shoal.kernels.native_library import Epilogue, NativeLibrary, PackedLinear
from shoal.kernels.native_plan import ExpertBuffers, NativePlan, PlanBuilder
from shoal.kernels.quantized_weights import QuantizedWeight, Weight, join
from shoal.kernels.screened_head import ScreenedHead, screen_head

GATED_EPILOGUES = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}


def check_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """As torch's embedding does; the kernels would read beyond the weight."""
    ids = input_ids.tolist()  # a step has few: sooner looked through here than by torch
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise IndexError(f"token ids must be in [0, {vocab_size - 1}]")


def logits_memory(batch: ForwardBatch | KnownStates, vocab_size: int) -> torch.Tensor:
    """For float32 [num_samples, vocab_size]: the spent logits' memory if there is enough."""
    shape = (batch.num_samples, vocab_size)
    spent = batch.spent_logits
    if spent is not None and spent.shape == shape:
        return spent
    if spent is None or spent.numel() < shape[0] * vocab_size:
        return huge_empty(shape, torch.float32)
    return spent.flatten()[: shape[0] * vocab_size].view(shape)


def pack(library: NativeLibrary, linear: Linear) -> PackedLinear:
    return library.pack_linear(linear.weight, linear.bias)


def pack_side_by_side(library: NativeLibrary, parts: list[Linear]) -> PackedLinear:
    """Several products of the same states as one."""
    biases = [part.bias for part in parts if part.bias is not None]
    weight = join([part.weight for part in parts])
    return library.pack_linear(weight, torch.cat(biases) if biases else None)


def pack_ends(
    library: NativeLibrary, embed_tokens: Weight, lm_head: Weight
) -> tuple[torch.Tensor | PackedLinear, PackedLinear]:
    """Embedding and output projection, packed once where they are the same."""
    packed_head = library.pack_linear(lm_head)
    if embed_tokens is lm_head:
        return packed_head, packed_head
    # Dense rows stay as they are; those of a quantised weight are read from its panels.
    is_packed = isinstance(embed_tokens, QuantizedWeight)
    return library.pack_linear(embed_tokens) if is_packed else embed_tokens, packed_head


def screen(lm_head: Weight) -> ScreenedHead | None:
    """What finds a step's likeliest tokens without all logits, where that pays."""
    return None if isinstance(lm_head, QuantizedWeight) else screen_head(lm_head)


def wants_tokens(batch: ForwardBatch | KnownStates, plan: NativePlan) -> torch.Tensor | None:
    """Where the plan leaves the likeliest tokens, int64 [num_samples], if the batch asks for them
    and the plan can tell."""
    if batch.likeliest is None or not plan.screens:
        return None
    batch.likeliest.tokens = torch.empty(batch.num_samples, dtype=torch.int64)
    return batch.likeliest.tokens


class HeadBuffers:
    """The buffers around attention, shared by layers of one shape."""

    def __init__(self, plan: PlanBuilder) -> None:
        self._plan = plan
        self._buffers: dict[tuple[int, int], tuple[int, int, int]] = {}

    def of(self, heads: AttentionHeads, row_width: int) -> tuple[int, int, int]:
        """For queries and what is beside them in a row; for queries; for what attention gives."""
        widths = (row_width, heads.query_width)
        if widths not in self._buffers:
            self._buffers[widths] = (
                self._plan.buffer(row_width, torch.float32),
                self._plan.buffer(heads.query_width),
                self._plan.buffer(heads.query_width),
            )
        return self._buffers[widths]


def expert_buffers(
    plan: PlanBuilder, hidden_size: int, intermediate_size: int, num_chosen: int
) -> ExpertBuffers:
    return ExpertBuffers(
        plan.buffer(num_chosen * hidden_size),
        plan.buffer(num_chosen * intermediate_size),
        plan.buffer(num_chosen * hidden_size, torch.float32),
    )
