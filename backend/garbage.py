"""The memory of processes that serve for long: what is there once one has started stays."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterable

HUGE_PAGE = 2 * 2**20
MADV_COLLAPSE = 25  # linux/mman.h, since 6.1


def settle() -> None:
    """Call it once a process has started.

    Keeps the collector from what is there: to look through it, some 200,000 objects beside torch,
    takes 0.1 s in which nobody is answered, and that comes at some time under load.

    And moves it into huge pages: a step's weights push code and objects out of all caches, those of
    addresses too, and each small page of them costs another walk to translate.
    """
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            _collapse_heap()


def _collapse_heap() -> None:
    """Whatever cannot be moved, for want of memory or on an older system, stays where it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # A mapped file's name may be any bytes.
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        ranges = heap_ranges(maps)
    for start, end in ranges:
        madvise(start, end - start, MADV_COLLAPSE)


def heap_ranges(maps: Iterable[str]) -> list[tuple[int, int]]:
    """Whole huge pages of private memory that is no file's, of a process' maps: malloc's heap and
    Python's arenas. Threads' stacks look alike but for the guard below; mostly empty, they would be
    filled where the system (before 6.7) does not refuse to move them."""
    ranges = []
    guard_end = 0
    for line in maps:
        addresses, access, *_, name = [*line.split(None, 5), ""][:6]
        first, last = (int(address, 16) for address in addresses.split("-"))
        is_stack = first == guard_end
        guard_end = last if access == "---p" and last - first < HUGE_PAGE else 0
        if is_stack or access != "rw-p" or name.strip() not in ("", "[heap]"):
            continue
        start, end = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
        if start < end:
            ranges.append((start, end))
    return ranges
