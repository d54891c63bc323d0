"""A heap whose items can be removed and given a new key."""

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_SLACK = 64


class LazyHeap(Generic[Item]):
    """Items by id, the one with the smallest key first. O(log n) an operation, amortised.

    A removed or re-keyed item leaves its old entry in the heap, to be dropped when it comes to the
    top; when such entries outnumber the live ones the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Any]] = []  # (key, item_id), some out of date
        self._live: dict[Any, tuple[Any, Item]] = {}  # item_id -> (key, item)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item_id: Any) -> bool:
        return item_id in self._live

    def __iter__(self) -> Iterator[Item]:
        """In no particular order."""
        return (item for _, item in self._live.values())

    def push(self, key: Any, item_id: Any, item: Item) -> None:
        """Add an item, or give it a new key. Keys and ids of one heap must be comparable."""
        self._live[item_id] = (key, item)
        heapq.heappush(self._entries, (key, item_id))
        if len(self._entries) > 2 * len(self._live) + _SLACK:
            self._entries = [(live[0], item_id) for item_id, live in self._live.items()]
            heapq.heapify(self._entries)

    def peek(self) -> Item | None:
        """The first item, which stays."""
        while self._entries:
            key, item_id = self._entries[0]
            live = self._live.get(item_id)
            if live is not None and live[0] == key:
                return live[1]
            heapq.heappop(self._entries)
        return None

    def key_of(self, item_id: Any) -> Any:
        return self._live[item_id][0]

    def remove(self, item_id: Any) -> bool:
        """Take an item out; False when it is not here."""
        return self._live.pop(item_id, None) is not None
