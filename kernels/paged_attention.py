"""Causal attention of a flat batch over keys and values in the paged cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from shoal.kernels.attention_mass import sum_block_mass
from shoal.kernels.kv_quantization import dequantize_heads
from shoal.kernels.layer_cache import LayerCache, as_copyable

# The widest head whose key/value heads torch shares between query heads by itself.
MAX_SHARED_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know of one step, the same for all layers of a kind.

    Sequence i has ``query_lens[i]`` new tokens, the last of its ``context_lens[i]`` tokens; their
    keys and values are in the cache already. With a window, a query at position p sees the keys in
    (p - window, p], and what lies before the first query's window is not read.
    """

    block_tables: torch.Tensor  # int64 [num_seqs, max_blocks], padded with 0
    query_lens: list[int]  # [num_seqs], sums to num_tokens
    context_lens: list[int]  # [num_seqs], query_lens included
    key_lens: list[int]  # [num_seqs]: the last so many tokens of the context are read
    key_slots: torch.Tensor  # int64 [sum of key_lens]: their slots in sequence order
    window: int | None = None
    # float32 [num_seqs, max_blocks]: attention adds there what each block got; None: nobody asks
    block_mass: torch.Tensor | None = None
    chunk_lens: list[int] | None = None  # new tokens, where not all of them are queries
    # By sequence, ranges of positions whose tokens see each other in both directions (an image's).
    spans: list[list[range]] | None = None

    @classmethod
    def build(
        cls,
        block_tables: torch.Tensor,
        query_lens: list[int],
        context_lens: list[int],
        block_size: int,
        window: int | None = None,
        block_mass: torch.Tensor | None = None,
        spans: list[list[range]] | None = None,
    ) -> "AttentionMetadata":
        """Lay out the step once, so that no layer has to."""
        key_lens = [
            context_len if window is None else min(context_len, query_len + window - 1)
            for query_len, context_len in zip(query_lens, context_lens, strict=True)
        ]
        offsets = torch.arange(block_size, device=block_tables.device)
        slots = (block_tables[:, :, None] * block_size + offsets).flatten(1)
        key_slots = torch.cat(
            [
                row[context_len - key_len : context_len]
                for row, context_len, key_len in zip(
                    slots.unbind(0), context_lens, key_lens, strict=True
                )
            ]
        )
        return cls(
            block_tables,
            query_lens,
            context_lens,
            key_lens,
            key_slots,
            window,
            block_mass,
            spans=spans,
        )

    def spans_in_keys(self, idx: int) -> list[range]:
        """Spans of a sequence, by the keys that are read instead of by position."""
        shift = self.context_lens[idx] - self.key_lens[idx]
        spans = self.spans[idx] if self.spans else []
        return [range(max(s.start - shift, 0), s.stop - shift) for s in spans if s.stop > shift]

    def last_queries(self, num_kept: list[int]) -> "AttentionMetadata":
        """The same step for the last ``num_kept`` queries of each sequence alone, without the
        sequences that keep none; the others read the keys that they read before. Adds no mass."""
        kept = [idx for idx, count in enumerate(num_kept) if count]
        slots = self.key_slots.split_with_sizes(self.key_lens)
        return AttentionMetadata(
            self.block_tables[kept],
            [num_kept[idx] for idx in kept],
            [self.context_lens[idx] for idx in kept],
            [self.key_lens[idx] for idx in kept],
            torch.cat([slots[idx] for idx in kept]),
            self.window,
            chunk_lens=[self.query_lens[idx] for idx in kept],
            spans=self.spans and [self.spans[idx] for idx in kept],
        )


def paged_attention(
    query: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend from ``query`` [num_tokens, num_heads, head_dim]; returns the same shape.

    Query head h reads key/value head h // (num_heads / num_kv_heads). ``softcap`` bounds the
    scores: softcap * tanh(score / softcap). The reference gathers what all sequences read in one go
    and then attends for each, by the very operations that transformers uses for a batch of one
    (torch's scaled_dot_product_attention, or its eager form where scores are capped): no sequence's
    result depends on what else is in the batch.
    """
    # [1, heads, tokens, head_dim]
    queries = query.transpose(0, 1)[None].split_with_sizes(metadata.query_lens, 2)
    stored_keys = cache.read_keys(metadata.key_slots)
    stored_values = as_copyable(cache.values).flatten(0, 1).index_select(0, metadata.key_slots)
    keys = _by_sequence(stored_keys, cache.key_scales, query.dtype, metadata)
    values = _by_sequence(
        stored_values.view(cache.values.dtype), cache.value_scales, query.dtype, metadata
    )
    if metadata.block_mass is not None:
        _add_block_mass(metadata, queries, keys, cache.block_size, scale, softcap)
    chunk_lens = metadata.chunk_lens or metadata.query_lens
    outputs = [
        _attend(*qkv, scale, metadata.window, chunk_lens[idx], metadata.spans_in_keys(idx))
        if softcap is None
        else _attend_capped(*qkv, scale, metadata.window, softcap)
        for idx, qkv in enumerate(zip(queries, keys, values, strict=True))
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _add_block_mass(
    metadata: AttentionMetadata,
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    block_size: int,
    scale: float,
    softcap: float | None,
) -> None:
    assert metadata.block_mass is not None
    num_blocks = metadata.block_mass.shape[1]
    parts = zip(metadata.block_mass, queries, keys, metadata.context_lens, strict=True)
    for row, query, key, context_len in parts:
        seen = causal_mask(query.shape[2], key.shape[2], metadata.window, query.device)
        first = context_len - key.shape[2]
        row += sum_block_mass(query[0], key[0], seen, scale, softcap, first, block_size, num_blocks)


def _by_sequence(
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    dtype: torch.dtype,
    metadata: AttentionMetadata,
) -> tuple[torch.Tensor, ...]:
    """What each sequence reads: [1, num_kv_heads, key_len, head_dim] in the model's dtype."""
    if scales is None:
        states = stored.to(dtype)
    else:
        read_scales = scales.flatten(0, 1).index_select(0, metadata.key_slots)
        states = dequantize_heads(stored, read_scales, dtype)
    return states.transpose(0, 1)[None].split_with_sizes(metadata.key_lens, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    chunk_len: int,
    spans: Sequence[range],
) -> torch.Tensor:
    num_heads, query_len, head_dim = query.shape[1:]
    num_kv_heads, key_len = key.shape[1:3]
    num_shared = num_heads // num_kv_heads
    mask = None
    in_chunk = 1 < chunk_len < key_len or 1 < query_len < key_len
    if in_chunk or spans or (window is not None and key_len >= window):
        mask = causal_mask(query_len, key_len, window, query.device, spans)
    torch_shares = mask is None and head_dim <= MAX_SHARED_HEAD_DIM
    if num_shared > 1 and not torch_shares:
        # Another kernel may run with a mask or a wide head, so these forms are part of the result.
        if query_len == 1:
            query = query.reshape(1, num_kv_heads, num_shared, head_dim)
        else:
            key, value = _repeat_heads(key, num_shared), _repeat_heads(value, num_shared)
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query_len > 1,
        scale=scale,
        enable_gqa=num_shared > 1 and torch_shares,
    )
    return output.reshape(1, num_heads, query_len, head_dim)


def _attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    query_len, key_len = query.shape[2], key.shape[2]
    num_shared = query.shape[1] // key.shape[1]
    scores = torch.matmul(query, _repeat_heads(key, num_shared).transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    seen = causal_mask(query_len, key_len, window, query.device)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, _repeat_heads(value, num_shared))


def _repeat_heads(states: torch.Tensor, times: int) -> torch.Tensor:
    # [1, num_kv_heads, key_len, head_dim] to [1, num_heads, key_len, head_dim]
    return states if times == 1 else states.repeat_interleave(times, dim=1)


def causal_mask(
    query_len: int,
    key_len: int,
    window: int | None,
    device: torch.device,
    spans: Sequence[range] = (),
) -> torch.Tensor:
    """Bool [query_len, key_len], True where attended: the last query is at the last key.

    Keys of a span are seen by the queries of the same span, later ones too.
    """
    ones = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
    first = key_len - query_len  # the first query's own key
    mask = ones.tril(first)
    for span in spans:
        mask[max(span.start - first, 0) : max(span.stop - first, 0), span.start : span.stop] = True
    return mask if window is None else mask.triu(first - window + 1)
