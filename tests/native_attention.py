"""Checks of the native attention, for whichever build of the kernels."""

import torch
from attention_context import MIXED, TOLERANCE, Context, num_threads

from shoal.kernels.native_library import NativeLibrary

LENGTHS = [70, 200, 65, 1]


def check_close_to_reference(
    native: NativeLibrary,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    head_dim: int,
    heads: tuple[int, int],
    stored: torch.dtype | None = None,
) -> None:
    context = Context(
        LENGTHS, dtype, heads, head_dim, window=window, softcap=softcap, stored=stored
    )
    out = context.native(native, *MIXED)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), context.reference(*MIXED), **TOLERANCE[dtype])


def check_decodes_equal_the_prefill(
    native: NativeLibrary,
    dtype: torch.dtype,
    window: int | None,
    stored: torch.dtype | None = None,
) -> None:
    context = Context([200], dtype, (9, 3), head_dim=64, window=window, stored=stored)
    whole = context.native(native, (0, 0, 200))
    steps = [context.native(native, (0, idx, idx + 1)) for idx in range(200)]
    assert torch.equal(torch.cat(steps), whole)


def check_company_changes_no_bit(
    native: NativeLibrary,
    dtype: torch.dtype,
    window: int | None,
    stored: torch.dtype | None = None,
) -> None:
    context = Context(LENGTHS, dtype, window=window, stored=stored)
    alone = torch.cat([context.native(native, part) for part in MIXED])
    assert torch.equal(context.native(native, *MIXED), alone)
    backwards = context.native(native, *reversed(MIXED))
    parts = backwards.split([end - begin for _, begin, end in reversed(MIXED)])
    assert torch.equal(torch.cat(parts[::-1]), alone)


def check_shared_tasks_change_no_bit(
    native: NativeLibrary,
    dtype: torch.dtype,
    window: int | None,
    stored: torch.dtype | None = None,
) -> None:
    """Many sequences, whose key/value heads share tasks, and each one alone."""
    for heads, head_dim in (((9, 3), 64), ((8, 8), 40), ((20, 10), 32)):
        lengths = [70, 200, 65, 1, 1100, 64]
        context = Context(lengths, dtype, heads, head_dim, window=window, stored=stored)
        ranges = [(idx, length - 1, length) for idx, length in enumerate(lengths)]
        ranges += [*MIXED, (1, 190, 194), (4, 700, 703), (4, 511, 512), (4, 512, 513)]
        with num_threads(2):
            alone = torch.cat([context.native(native, part) for part in ranges])
        for count in (1, 2, 3):
            with num_threads(count):
                assert torch.equal(context.native(native, *ranges), alone), (heads, count)
        torch.testing.assert_close(alone.float(), context.reference(*ranges), **TOLERANCE[dtype])


def check_split_tasks_change_no_bit(
    native: NativeLibrary,
    dtype: torch.dtype,
    window: int | None,
    stored: torch.dtype | None = None,
) -> None:
    """A long context, whose tasks several threads share, and the same on one thread."""
    context = Context([1700, 3], dtype, (3, 1), head_dim=32, window=window, stored=stored)
    ranges = ((0, 1690, 1700),)
    with num_threads(1):
        alone = context.native(native, *ranges)
    tokens = [context.native(native, (0, idx, idx + 1)) for idx in range(1690, 1700)]
    assert torch.equal(torch.cat(tokens), alone)
    for count in (2, 3, 5):
        with num_threads(count):
            assert torch.equal(context.native(native, *ranges), alone)
            assert torch.equal(context.native(native, *ranges, (1, 0, 3))[:10], alone)
    torch.testing.assert_close(alone.float(), context.reference(*ranges), **TOLERANCE[dtype])
