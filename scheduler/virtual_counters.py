"""Service given to each party, and which of those that wait was served the least."""

from collections.abc import Callable

from shoal.scheduler.lazy_heap import LazyHeap

_MAX_IDLE = 1024
_MAX_SKIPPED = 16


class VirtualCounters:
    """A virtual token counter per key, with the lift of the VTC paper (Sheng et al., OSDI '24).

    A key that comes to wait again is lifted to the level of those waiting, less a bounded credit,
    so nobody saves up more service than that while idle. An ``offset`` is added to a waiting key's
    counter for the order alone. O(log n) an operation, amortised.
    """

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._offset: dict[str, float] = {}  # of waiting keys
        self._waiting: LazyHeap[str] = LazyHeap()
        self._last_left: str | None = None
        self._front = 0.0  # the counter of the most served key that was taken

    def __contains__(self, key: str) -> bool:
        """Whether the key waits."""
        return key in self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def service(self, key: str) -> float:
        """The counter; of an unknown key, what it would be lifted to."""
        known = self._service.get(key)
        return self._level() if known is None else known

    def enter(self, key: str, offset: float = 0.0, credit: float = 0.0) -> None:
        """The key waits from now on: lift its counter. Or it has a new offset."""
        if key not in self._waiting:
            level = self._level()
            service = max(self._service.get(key, level), level - credit)
            self._forget_idle(level)
            self._service[key] = service
        self._offset[key] = offset
        self._push(key)

    def leave(self, key: str) -> None:
        """The key waits no more."""
        if self._waiting.remove(key):
            del self._offset[key]
            self._last_left = key

    def note_taken(self, key: str) -> None:
        """One of the key's is served."""
        self._front = max(self._front, self._service[key])

    def lag(self, key: str) -> float:
        """How much less the key was served than the most served one that was taken."""
        return self._front - self.service(key)

    def charge(self, key: str, cost: float) -> None:
        """Add to a counter; negative gives back."""
        self._service[key] = self.service(key) + cost
        if cost < 0 and key in self._waiting:  # a rise is noted when the key comes to the top
            self._push(key)

    def least(self) -> str | None:
        """The waiting key with the smallest counter and offset."""
        while (key := self._waiting.peek()) is not None:
            if self._order(key) <= self._waiting.key_of(key):
                return key
            self._push(key)
        return None

    def least_tied(self, quantum: float, limit: int) -> list[str]:
        """The least key and up to ``limit - 1`` others less than ``quantum`` behind it."""
        tied: list[str] = []
        bound = 0.0
        while len(tied) < limit and (key := self.least()) is not None:
            if tied and self._order(key) >= bound:
                break
            bound = bound if tied else self._order(key) + quantum
            tied.append(key)
            self._waiting.remove(key)
        for key in tied:
            self._push(key)
        return tied

    def least_other(self, skips: Callable[[str], bool], slack: float) -> str | None:
        """The least key but those that ``skips`` says, if at most ``slack`` behind the least.

        Costs O(log n) for each key that is skipped; gives up after so many.
        """
        first = self.least()
        if first is None:
            return None
        bound = self._order(first) + slack
        skipped: list[str] = []
        while (key := self.least()) is not None and skips(key):
            if len(skipped) == _MAX_SKIPPED:
                key = None
                break
            skipped.append(key)
            self._waiting.remove(key)
        for other in skipped:
            self._push(other)
        return key if key is not None and self._service[key] <= bound else None

    def _order(self, key: str) -> float:
        return self._service[key] + self._offset[key]

    def _push(self, key: str) -> None:
        self._waiting.push(self._order(key), key, key)

    def _level(self) -> float:
        """Where a newcomer starts: at the least served of those waiting, or the last to leave."""
        key = self.least()
        if key is None:
            key = self._last_left
        return 0.0 if key is None else self._service[key]

    def _forget_idle(self, level: float) -> None:
        """Keep the number of keys bounded: one at or below the level would be lifted anyway."""
        if len(self._service) <= 2 * len(self._waiting) + 2 * _MAX_IDLE:
            return
        idle = [key for key in self._service if self._is_forgettable(key)]
        indebted = sorted(
            (key for key in idle if self._service[key] > level), key=self._service.__getitem__
        )
        for key in set(idle) - set(indebted[-_MAX_IDLE:]):
            del self._service[key]

    def _is_forgettable(self, key: str) -> bool:
        return key not in self._waiting and key != self._last_left
