"""Causal attention of a flat batch over keys and values in the paged cache."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know of one step, the same for all layers.

    Sequence i has ``query_lens[i]`` new tokens, the last of its ``context_lens[i]`` tokens; their
    keys and values are in the cache already.
    """

    block_tables: torch.Tensor  # int64 [num_seqs, max_blocks], padded with 0
    query_lens: list[int]  # [num_seqs], sums to num_tokens
    context_lens: list[int]  # [num_seqs], query_lens included
    context_slots: torch.Tensor  # int64 [sum of context_lens]: slots in sequence order

    @classmethod
    def build(
        cls,
        block_tables: torch.Tensor,
        query_lens: list[int],
        context_lens: list[int],
        block_size: int,
    ) -> "AttentionMetadata":
        """Lay out the step once, so that no layer has to."""
        offsets = torch.arange(block_size, device=block_tables.device)
        slots = (block_tables[:, :, None] * block_size + offsets).flatten(1)
        context_slots = torch.cat(
            [row[:length] for row, length in zip(slots.unbind(0), context_lens, strict=True)]
        )
        return cls(block_tables, query_lens, context_lens, context_slots)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend from ``query`` [num_tokens, num_heads, head_dim]; returns the same shape.

    The caches are [num_blocks, block_size, num_kv_heads, head_dim]; query head h reads key/value
    head h // (num_heads / num_kv_heads). The reference gathers the contexts of all sequences in one
    go and then calls torch's scaled_dot_product_attention for each, as transformers does for a
    batch of one: no sequence's result depends on what else is in the batch.
    """
    # [1, heads, tokens, head_dim]
    queries = query.transpose(0, 1)[None].split_with_sizes(metadata.query_lens, 2)
    keys = _gather(key_cache, metadata).split_with_sizes(metadata.context_lens, 2)
    values = _gather(value_cache, metadata).split_with_sizes(metadata.context_lens, 2)
    outputs = [_attend(*qkv, scale) for qkv in zip(queries, keys, values, strict=True)]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _gather(cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    # [1, num_kv_heads, sum of context_lens, head_dim]
    return cache.flatten(0, 1).index_select(0, metadata.context_slots).transpose(0, 1)[None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    query_len, context_len = query.shape[2], key.shape[2]
    mask = None
    if 1 < query_len < context_len:
        mask = _chunk_mask(query_len, context_len, query.device)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=1 < query_len == context_len,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _chunk_mask(query_len: int, context_len: int, device: torch.device) -> torch.Tensor:
    # bool [query_len, context_len], True where attended: the last query sees the whole context.
    ones = torch.ones(query_len, context_len, dtype=torch.bool, device=device)
    return ones.tril(context_len - query_len)
