"""Sequences with keys, values and queries of their own, for tests of attention kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.layer_cache import SCALED_DTYPES, LayerCache, as_panels
from shoal.kernels.native_heads import AttentionHeads
from shoal.kernels.native_library import NativeLibrary
from shoal.kernels.paged_attention import AttentionMetadata, paged_attention

# One bf16 rounding is 2^-9 of the value; products of float32 differ in their order only.
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}


# (sequence, begin, end) of chunks and decodes in one batch.
MIXED = ((0, 0, 70), (1, 199, 200), (2, 20, 65), (3, 0, 1), (1, 64, 129))


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def empty_layer_cache(
    shape: tuple[int, ...], stored: torch.dtype, key_panels: bool = False
) -> LayerCache:
    """NaN everywhere: in 8 bits that is a matter of scales."""
    nan = float("nan")
    if stored not in SCALED_DTYPES:
        keys, values = (torch.full(shape, nan).to(stored) for _ in range(2))
        return LayerCache(as_panels(keys) if key_panels else keys, values)
    keys, values = (torch.zeros(shape, dtype=stored) for _ in range(2))
    scales = (torch.full(shape[:-1], nan) for _ in range(2))
    return LayerCache(keys, values, *scales)


class Context:
    """Sequences in a paged cache that is NaN wherever nothing was written."""

    def __init__(
        self,
        lengths: list[int],
        dtype: torch.dtype,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 32,
        block_size: int = 16,
        window: int | None = None,
        softcap: float | None = None,
        stored: torch.dtype | None = None,
        key_panels: bool = False,
    ) -> None:
        self.lengths = lengths
        self.heads = AttentionHeads(*heads, head_dim, head_dim**-0.5, window, softcap)
        width = max(-(-length // block_size) for length in lengths)
        num_blocks = 1 + width * len(lengths)  # nobody's block 0 stays NaN
        order = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(5))
        self.block_tables = order.view(len(lengths), width)
        self.block_size = block_size
        shape = (num_blocks, block_size, heads[1], head_dim)
        self.cache = empty_layer_cache(shape, stored or dtype, key_panels)
        for idx, length in enumerate(lengths):
            slots = self.block_tables[idx][:, None] * block_size + torch.arange(block_size)
            rows = slots.flatten()[:length]
            key, value = (
                normal(length, heads[1], head_dim, seed=seed + idx, dtype=dtype)
                for seed in (10, 20)
            )
            kv_cache_write(key, value, self.cache, rows)
        self.queries = [
            normal(length, heads[0], head_dim, seed=30 + idx, dtype=dtype)
            for idx, length in enumerate(lengths)
        ]

    def native(
        self, native: NativeLibrary, *ranges: tuple[int, int, int], **options: Any
    ) -> torch.Tensor:
        """Attend for tokens begin to end of some sequences: (sequence, begin, end)."""
        return native.paged_attention(
            torch.cat([self.queries[idx][begin:end] for idx, begin, end in ranges]),
            self.cache,
            self.tables(*ranges),
            [end - begin for _, begin, end in ranges],
            [end for _, _, end in ranges],
            self.heads,
            **options,
        )

    def tables(self, *ranges: tuple[int, int, int]) -> torch.Tensor:
        """Block tables in which blocks that lie before all windows read 0."""
        tables = self.block_tables[[idx for idx, _, _ in ranges]]
        if self.heads.window is not None:
            for row, (_, begin, _) in zip(tables, ranges, strict=True):
                row[: max(0, begin - self.heads.window + 1) // self.block_size] = 0
        return tables.contiguous()

    def mass_rows(self, *ranges: tuple[int, int, int]) -> torch.Tensor:
        """Room for the block mass of those sequences."""
        return torch.zeros(len(ranges), self.block_tables.shape[1], dtype=torch.int64)

    def reference(
        self, *ranges: tuple[int, int, int], block_mass: torch.Tensor | None = None
    ) -> torch.Tensor:
        metadata = AttentionMetadata.build(
            self.tables(*ranges),
            [end - begin for _, begin, end in ranges],
            [end for _, _, end in ranges],
            self.block_size,
            self.heads.window,
            block_mass=block_mass,
        )
        return paged_attention(
            torch.cat([self.queries[idx][begin:end] for idx, begin, end in ranges]).float(),
            self.cache,
            metadata,
            self.heads.scale,
            self.heads.softcap,
        )
