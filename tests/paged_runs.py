"""Running a model by hand over a paged cache, without scheduler or sampler."""

import dataclasses
from collections.abc import Sequence as SequenceOf

import torch

from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.model_runner import build_forward_batch
from shoal.backend.models.decoder import Decoder
from shoal.scheduler.outputs import ScheduledSequence
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

BLOCK_SIZE = 4


def make_cache(
    model: Decoder,
    num_blocks: int = 64,
    fill: float = float("nan"),
    stored: torch.dtype | None = None,
) -> PagedKVCache:
    """A cache full of NaN, so that a read of any slot that was not written shows in the result."""
    layout = model.config.kv_layout
    kv = PagedKVCache(layout, [num_blocks] * len(layout.groups), BLOCK_SIZE, stored or model.dtype)
    fill_cache(kv, fill)
    return kv


def fill_cache(kv: PagedKVCache, fill: float) -> None:
    """In 8 bits it is the scales that can be NaN."""
    for group in range(len(kv.layout.groups)):
        for part in kv.block_parts(group):
            if part.is_floating_point():
                part.fill_(fill)


def make_paged_sequence(token_ids: SequenceOf[int], *block_tables: SequenceOf[int]) -> Sequence:
    """A sequence of which nothing is computed, with its blocks: one table for
    all KV groups, or one each."""
    sampling = SamplingParams(temperature=0.0)
    tables = [list(table) for table in block_tables]
    return Sequence(tables[0][0], list(token_ids), len(token_ids), sampling, block_tables=tables)


def run_step(
    model: Decoder,
    kv: PagedKVCache,
    *scheduled: tuple[Sequence, int],
    all_rows: bool = False,
) -> torch.Tensor:
    """Logits of one step that runs so many tokens of each sequence; mutates the sequences.

    One row a sequence that reaches its last token, or a row a token with ``all_rows``.
    """
    for sequence, _ in scheduled:
        if len(sequence.block_tables) == 1:  # the same blocks in every group of layers
            sequence.block_tables = [sequence.block_table] * len(kv.layout.groups)
    items = [ScheduledSequence(sequence, num_tokens) for sequence, num_tokens in scheduled]
    batch = build_forward_batch(items, kv.block_size, model.device)
    if all_rows:
        rows = torch.arange(len(batch.input_ids))
        batch = dataclasses.replace(batch, logits_indices=rows)
    logits = model.forward(batch, kv)
    for sequence, num_tokens in scheduled:
        sequence.num_computed_tokens += num_tokens
    return logits
