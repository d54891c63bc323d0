"""Native attention: close to the reference, and blind to company, chunks and threads."""

import native_attention
import pytest
import torch
from attention_context import MIXED, TOLERANCE, Context, num_threads

from shoal.kernels.native_library import NativeLibrary

WINDOWS = [None, 1, 40, 64, 90]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("head_dim", [24, 32, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)])
def test_close_to_reference(
    native: NativeLibrary, dtype: torch.dtype, head_dim: int, heads: tuple[int, int]
) -> None:
    native_attention.check_close_to_reference(native, dtype, None, None, head_dim, heads)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("heads", [(4, 4), (100, 2)])
def test_windows_and_capped_scores(
    native: NativeLibrary,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    heads: tuple[int, int],
) -> None:
    """Blocks before every window belong to nobody, and are NaN."""
    native_attention.check_close_to_reference(native, dtype, window, softcap, 48, heads)


@pytest.mark.parametrize("window", [None, 40, 600])
def test_split_tasks_change_no_bit(
    native: NativeLibrary, dtype: torch.dtype, window: int | None
) -> None:
    native_attention.check_split_tasks_change_no_bit(native, dtype, window)


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("window", [None, 40])
def test_block_size_changes_no_bit(
    native: NativeLibrary, dtype: torch.dtype, block_size: int, window: int | None
) -> None:
    lengths = native_attention.LENGTHS
    expected = Context(lengths, dtype, block_size=16, window=window).native(native, *MIXED)
    context = Context(lengths, dtype, block_size=block_size, window=window)
    assert torch.equal(context.native(native, *MIXED), expected)


@pytest.mark.parametrize("window", WINDOWS)
def test_every_split_equals_the_whole(
    native: NativeLibrary, dtype: torch.dtype, window: int | None
) -> None:
    context = Context([131], dtype, (9, 3), window=window)
    whole = context.native(native, (0, 0, 131))
    for split in range(1, 131, 1 if window is None else 7):
        first = context.native(native, (0, 0, split))
        second = context.native(native, (0, split, 131))
        assert torch.equal(torch.cat([first, second]), whole), split


@pytest.mark.parametrize("window", WINDOWS)
def test_decodes_equal_the_prefill(
    native: NativeLibrary, dtype: torch.dtype, window: int | None
) -> None:
    native_attention.check_decodes_equal_the_prefill(native, dtype, window)


@pytest.mark.parametrize("window", WINDOWS)
def test_company_changes_no_bit(
    native: NativeLibrary, dtype: torch.dtype, window: int | None
) -> None:
    native_attention.check_company_changes_no_bit(native, dtype, window)


@pytest.mark.parametrize("window", [None, 40, 600])
@pytest.mark.parametrize("is_8_bit", [False, True])
def test_shared_tasks_change_no_bit(
    native: NativeLibrary, dtype: torch.dtype, window: int | None, is_8_bit: bool
) -> None:
    stored = torch.int8 if is_8_bit else None
    native_attention.check_shared_tasks_change_no_bit(native, dtype, window, stored)


def test_neighbour_with_nan_changes_nothing(native: NativeLibrary, dtype: torch.dtype) -> None:
    context = Context([70, 80], dtype)
    clean = context.native(native, (0, 69, 70), (1, 79, 80))
    context.cache.keys[context.block_tables[1, 0]] = float("nan")
    poisoned = context.native(native, (0, 69, 70), (1, 79, 80))
    assert torch.equal(clean[0], poisoned[0])
    assert bool(poisoned[1].isnan().all())


def test_large_scores_do_not_overflow(native: NativeLibrary, dtype: torch.dtype) -> None:
    context = Context([150], dtype)
    context.queries[0] *= 300
    out = context.native(native, (0, 0, 150))
    assert bool(out.isfinite().all())
    torch.testing.assert_close(
        out.float(), context.reference((0, 0, 150)), **TOLERANCE[torch.bfloat16]
    )


@pytest.mark.parametrize("count", [1, 2])
def test_sequences_without_queries(native: NativeLibrary, dtype: torch.dtype, count: int) -> None:
    """As where only sampled rows go on; with so many sequences heads share tasks."""
    context = Context([70, 20, 65, 3] * 3, dtype)
    ranges = [(idx, length - idx % 3, length) for idx, length in enumerate(context.lengths)]
    with num_threads(count):
        out = context.native(native, *ranges)
        alone = [context.native(native, part) for part in ranges if part[1] < part[2]]
    assert torch.equal(out, torch.cat(alone))
