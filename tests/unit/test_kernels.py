"""The reference kernels against the formulas written out plainly."""

import math

import pytest
import torch

from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.paged_attention import AttentionMetadata, paged_attention
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rotary_embedding import rotary_angles, rotary_embedding
from shoal.kernels.silu_and_mul import silu_and_mul

BLOCK_SIZE = 4
NAN = float("nan")


def naive_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """In float64, by token and head: [queries, heads, dim] over [context, kv_heads, dim].

    The last query is the last token of the context.
    """
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for row in range(query.shape[0]):
        seen = keys.shape[0] - query.shape[0] + row + 1
        for head in range(query.shape[1]):
            scores = keys[:seen, head // group] @ query[row, head] * scale
            out[row, head] = scores.softmax(0) @ values[:seen, head // group]
    return out


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [1]),
        ([1], [13]),
        ([7], [7]),
        ([3], [10]),
        ([1, 5, 1, 2, 8], [9, 5, 4, 11, 8]),  # decodes, prefills and a chunk, full blocks too
    ],
)
def test_paged_attention_equals_plain_attention(
    num_heads: int, num_kv_heads: int, query_lens: list[int], context_lens: list[int]
) -> None:
    torch.manual_seed(0)
    head_dim, scale = 8, 8**-0.5
    blocks = iter(torch.randperm(32).tolist())
    tables = [[next(blocks) for _ in range(math.ceil(n / BLOCK_SIZE))] for n in context_lens]
    width = max(map(len, tables))
    block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    # Whatever is not written must not be read.
    key_cache = torch.full((32, BLOCK_SIZE, num_kv_heads, head_dim), NAN)
    value_cache = torch.full_like(key_cache, NAN)
    keys = [torch.randn(n, num_kv_heads, head_dim) for n in context_lens]
    values = [torch.randn(n, num_kv_heads, head_dim) for n in context_lens]
    for table, key, value in zip(tables, keys, values, strict=True):
        slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(key))]
        kv_cache_write(key, value, LayerCache(key_cache, value_cache), torch.tensor(slots))
    query = torch.randn(sum(query_lens), num_heads, head_dim)

    metadata = AttentionMetadata.build(block_tables, query_lens, context_lens, BLOCK_SIZE)
    output = paged_attention(query, LayerCache(key_cache, value_cache), metadata, scale)

    queries = query.split(query_lens)
    expected = torch.cat(
        [naive_attention(*qkv, scale) for qkv in zip(queries, keys, values, strict=True)]
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_kv_cache_write_touches_only_its_slots() -> None:
    key_cache, value_cache = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4)
    key, value = torch.ones(2, 1, 4), torch.full((2, 1, 4), 2.0)
    kv_cache_write(key, value, LayerCache(key_cache, value_cache), torch.tensor([5, 2]))
    written = key_cache.flatten(0, 1)[:, 0, 0].tolist()
    assert written == [0, 0, 1, 0, 0, 1]
    assert value_cache.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 2, 0, 0, 2]


def test_rms_norm_formula() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 24), torch.randn(24)
    expected = hidden.double() / (hidden.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    output = rms_norm(hidden, weight, 1e-5)
    torch.testing.assert_close(output.double(), expected * weight, atol=1e-5, rtol=1e-5)


def test_rms_norm_keeps_the_dtype() -> None:
    weight = torch.ones(8, dtype=torch.bfloat16)
    assert rms_norm(torch.ones(2, 8).bfloat16(), weight, 1e-5).dtype == torch.bfloat16


def test_rotary_embedding_rotates_each_pair_by_its_angle() -> None:
    torch.manual_seed(0)
    states = torch.randn(3, 2, 8)
    inv_freq = torch.tensor([1.0, 0.5, 0.1, 0.01])
    positions = torch.tensor([0, 1, 700])
    output = rotary_embedding(states, rotary_angles(positions, inv_freq, torch.float32))
    pairs = torch.complex(states[..., :4].double(), states[..., 4:].double())
    angles = positions[:, None].double() * inv_freq.double()
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((rotated.real, rotated.imag), dim=-1)
    torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(output[0], states[0])


def test_silu_and_mul_formula() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_and_mul(gate, up), expected)
