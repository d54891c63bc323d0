"""The reference attention equals transformers' bit for bit, with windows and capped scores."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MistralConfig
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.paged_attention import AttentionMetadata, paged_attention

BLOCK_SIZE = 4
SPLITS = [[21], [1] * 12, [5, 1, 1, 9, 1, 2, 1], [3, 4, 4, 8, 1]]


class TheirAttention:
    """One layer's attention in transformers, fed chunk by chunk through its own cache."""

    def __init__(self, heads: tuple[int, int], window: int | None, softcap: float | None) -> None:
        self._config = MistralConfig(num_hidden_layers=1, sliding_window=window)
        self._config._attn_implementation = "eager" if softcap else "sdpa"
        self._cache = DynamicCache(config=self._config)
        self._module = SimpleNamespace(
            num_key_value_groups=heads[0] // heads[1], is_causal=True, training=False
        )
        self._softcap = softcap

    def feed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """From [num_tokens, heads, head_dim] to the same shape."""
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        make_mask = create_causal_mask
        if self._config.sliding_window is not None:
            make_mask = create_sliding_window_causal_mask
        embeds = torch.empty(1, query.shape[2], 1, dtype=query.dtype)
        mask = make_mask(self._config, embeds, None, self._cache)
        key, value = self._cache.update(key, value, 0)
        options: dict[str, Any] = {"scaling": scale, "softcap": self._softcap}
        attend = eager_attention_forward if self._softcap else sdpa_attention_forward
        return attend(self._module, query, key, value, mask, **options)[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 2, 3, 8, 64])
@pytest.mark.parametrize(
    ("heads", "head_dim", "softcap"),
    [((4, 4), 16, None), ((4, 2), 16, None), ((4, 1), 320, None), ((4, 2), 16, 5.0)],
)
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split)))
def test_equals_transformers_in_any_split(
    dtype: torch.dtype,
    window: int | None,
    heads: tuple[int, int],
    head_dim: int,
    softcap: float | None,
    split: list[int],
) -> None:
    torch.manual_seed(0)
    theirs = TheirAttention(heads, window, softcap)
    block_table = torch.randperm(16)[None]
    shape = (16, BLOCK_SIZE, heads[1], head_dim)
    key_cache, value_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    context_len = 0
    for query_len in split:
        positions = torch.arange(context_len, context_len + query_len)
        context_len += query_len
        query = torch.randn(query_len, heads[0], head_dim, dtype=dtype)
        key, value = (torch.randn(query_len, heads[1], head_dim, dtype=dtype) for _ in range(2))
        slots = block_table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        kv_cache_write(key, value, LayerCache(key_cache, value_cache), slots)
        metadata = AttentionMetadata.build(
            block_table, [query_len], [context_len], BLOCK_SIZE, window
        )
        output = paged_attention(query, LayerCache(key_cache, value_cache), metadata, 0.25, softcap)
        assert torch.equal(output, theirs.feed(query, key, value, 0.25))


def test_what_left_the_window_is_not_read() -> None:
    window, context_len = 5, 14
    key_cache, value_cache = (torch.randn(4, BLOCK_SIZE, 1, 8) for _ in range(2))
    query = torch.randn(1, 2, 8)
    whole = AttentionMetadata.build(
        torch.tensor([[0, 1, 2, 3]]), [1], [context_len], BLOCK_SIZE, window
    )
    expected = paged_attention(query, LayerCache(key_cache, value_cache), whole, 1.0)
    key_cache[:2], value_cache[:2] = float("nan"), float("nan")
    freed = AttentionMetadata.build(
        torch.tensor([[0, 0, 2, 3]]), [1], [context_len], BLOCK_SIZE, window
    )
    cache = LayerCache(key_cache, value_cache)
    assert torch.equal(paged_attention(query, cache, freed, 1.0), expected)
