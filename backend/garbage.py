"""The memory of processes that serve for long: what is there once one has started stays."""

import contextlib
import ctypes
import gc
import mmap
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
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for start, end in ranges:
            for page in range(start, end, HUGE_PAGE):
                pagemap.seek(page // mmap.PAGESIZE * 8)
                if mostly_there(pagemap.read(HUGE_PAGE // mmap.PAGESIZE * 8)):
                    madvise(page, HUGE_PAGE, MADV_COLLAPSE)


def mostly_there(entries: bytes) -> bool:
    """Whether three quarters of a huge page's small ones or more are in memory, as what moves takes
    a whole one. ``entries``: 64 bits of each from /proc/self/pagemap; the highest says so."""
    last_bytes = entries[7::8]
    return 4 * sum(byte >= 128 for byte in last_bytes) >= 3 * len(last_bytes) > 0


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
