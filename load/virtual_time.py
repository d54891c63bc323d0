"""Virtual time: events in order of their time, and a clock that jumps from one to the next."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class EventLoop:
    """Runs actions at their virtual times; those of one time in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.num_events = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0
        self._stopped = False

    def at(self, time: float, action: Action, *args: Any) -> None:
        """Run ``action(*args)`` at a time, which must not lie in the past."""
        assert time >= self.now, f"an event at {time} is asked for at {self.now}"
        heapq.heappush(self._heap, (time, self._order, action, args))
        self._order += 1

    def after(self, delay: float, action: Action, *args: Any) -> None:
        """Run ``action(*args)`` that many seconds from now."""
        self.at(self.now + delay, action, *args)

    def stop(self) -> None:
        """Let ``run`` return after the present event; what is still to come is dropped."""
        self._stopped = True

    def run(self) -> None:
        """Run events until none is left or one calls ``stop``."""
        heap = self._heap
        self._stopped = False
        while heap and not self._stopped:
            self.now, _, action, args = heapq.heappop(heap)
            self.num_events += 1
            action(*args)
