"""Objects that are there from the start are not the collector's any more."""

import gc
import mmap
import os
import weakref
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from shoal.backend.garbage import HUGE_PAGE, heap_ranges, mostly_there, settle


class Knot:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_already_is_not_looked_through_again() -> None:
    kept = [Knot() for _ in range(10)]
    settle()
    assert gc.get_freeze_count() >= len(kept)
    ids = {id(tracked) for tracked in gc.get_objects()}
    assert not any(id(knot) in ids for knot in kept)


def test_garbage_of_before_is_freed_first_and_that_of_later_as_ever() -> None:
    before = weakref.ref(Knot())
    settle()
    assert before() is None
    later = weakref.ref(Knot())
    gc.collect()
    assert later() is None


def test_what_lies_on_the_heap_stays_as_it_was() -> None:
    pieces = [os.urandom(2**20) for _ in range(8)]
    digests = [sha256(piece).digest() for piece in pieces]
    settle()
    assert [sha256(piece).digest() for piece in pieces] == digests


def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/mod\xe8le"
    with open(path, "w+b") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            settle()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_is_mostly_empty_is_not_filled() -> None:
    num_pages = 32
    with mmap.mmap(-1, (num_pages + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE) as sparse:
        sparse.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(num_pages):
            sparse[page * HUGE_PAGE] = 1
        sparse.madvise(mmap.MADV_HUGEPAGE)
        before = resident_bytes()
        settle()
        assert resident_bytes() - before < num_pages // 2 * HUGE_PAGE


def test_three_quarters_are_mostly() -> None:
    there, absent = bytes(7) + b"\x81", bytes(7) + b"\x01"
    assert mostly_there(there * 3 + absent)
    assert not mostly_there(there * 2 + absent * 2)
    assert not mostly_there(b"")


def test_only_whole_pages_of_the_heap_are_moved() -> None:
    lines = [
        "555555400000-555555a01000 rw-p 00000000 00:00 0                  [heap]",
        "7f0000100000-7f0000600000 rw-p 00000000 00:00 0 ",
        "7f0000700000-7f0000f00000 rw-p 00000000 00:00 0                  [stack]",
        "7f0001000000-7f0002000000 r--p 00000000 00:00 0 ",
        "7f0002000000-7f0003000000 rw-s 00000000 00:00 0 ",
        "7f0003000000-7f0004000000 rw-p 00000000 08:01 99                 /lib/x y.so",
        "7f0004100000-7f0004300000 rw-p 00000000 00:00 0 ",
        "7f0005000000-7f0005001000 ---p 00000000 00:00 0 ",
        "7f0005001000-7f0005801000 rw-p 00000000 00:00 0 ",  # a thread's stack
        "7f0008000000-7f0008021000 rw-p 00000000 00:00 0 ",
        "7f0008021000-7f000c000000 ---p 00000000 00:00 0 ",
        "7f000c000000-7f000c400000 rw-p 00000000 00:00 0 ",
    ]
    assert heap_ranges(lines) == [
        (0x555555400000, 0x555555A00000),
        (0x7F0000200000, 0x7F0000600000),
        (0x7F000C000000, 0x7F000C400000),
    ]
