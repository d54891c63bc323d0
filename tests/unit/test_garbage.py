"""Objects that are there from the start are not the collector's any more."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from shoal.backend.garbage import settle


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
