"""Refuses at the shim's door what the backend's queue has no place for.

A refusal by the backend costs four processes a few milliseconds together: at ten times what the
server can do, a good part of what it could have done instead. What the backend told of its queue
in the last heartbeat is enough to refuse most of them before their bodies are read. Who passes the
door is still the backend's to take or to refuse.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from shoal.client.errors import ShoalError

BELIEVED_S = 1.0  # how long a heartbeat says how full the queue is
MAX_TIERS = 16  # names that clients may send are without number
MIN_RETRY_MS, MAX_RETRY_MS = 100, 3_600_000


class Door:
    """One model's. Open unless the last heartbeat said that whoever comes would have to wait, and
    that nothing makes way for him; then it lets in as many as there were places, and one more with
    each that comes free since. Times are seconds of one clock.

    Each that is refused is told when the place after those promised before comes free, and is
    counted in ``refused`` by the tier that he asked for.
    """

    def __init__(
        self, refused: Counter[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.refused: Counter[str] = Counter() if refused is None else refused
        self._clock = clock
        self._is_closed = False
        self._told_at = -math.inf
        self._counted_at = 0.0
        self._num_free = 0.0
        self._most_free = 0.0
        self._interval_s = 1.0
        self._promised_until = 0.0

    def take(self, queue: Mapping[str, Any] | None) -> None:
        """What a heartbeat tells of the queue: ``DrainEstimate.at_the_door``."""
        now = self._clock()
        self._is_closed = bool(queue and queue["is_closed"])
        if not queue or not self._is_closed:
            self._promised_until = 0.0
            return
        self._told_at = self._counted_at = now
        self._num_free = float(queue["places"])
        self._most_free = float(queue["max_queued_requests"])
        self._interval_s = queue["interval_ms"] / 1000
        self._promised_until = max(self._promised_until, now + queue["promised_ms"] / 1000)

    @property
    def is_shut(self) -> bool:
        """Whether ``enter`` would refuse."""
        now = self._clock()
        if not self._is_closed or now - self._told_at > BELIEVED_S:
            return False
        freed = (now - self._counted_at) / max(1e-3, self._interval_s)
        self._num_free = min(self._most_free, self._num_free + freed)
        self._counted_at = now
        return self._num_free < 1

    def enter(self, tier: str = "") -> None:
        """Let one request in. Raises ShoalError (429) when there is no place for it."""
        if self.is_shut:
            raise self.refusal(tier)
        self._num_free -= 1

    def refusal(self, tier: str = "") -> ShoalError:
        """What one that finds no place is told; promises him the next that is not promised."""
        now = self._clock()
        self.refused[tier if tier in self.refused or len(self.refused) < MAX_TIERS else ""] += 1
        self._promised_until = max(self._promised_until, now) + self._interval_s
        wait_ms = 1000 * (self._promised_until - now)
        return ShoalError(
            f"The queue is full ({self._most_free:.0f} requests). Retry later.",
            429,
            "queue_full",
            retry_after_ms=round(min(MAX_RETRY_MS, max(MIN_RETRY_MS, wait_ms))),
        )
