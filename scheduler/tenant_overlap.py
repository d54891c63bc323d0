"""Whether several tenants are likely to be about again, going by how long they stayed away."""

from collections import deque

# Who stays away so long has gone: what was learnt of absences is forgotten, and this is the wait.
LONGEST_ABSENCE_S = 30.0
_NUM_ABSENCES = 32  # remembered: those within a burst of requests, and the pause before it
_LEAST_ABSENCES = 8  # fewer tell nothing yet
_MARGIN = 3.0  # the next one may be so many times as long as the longest of them


class TenantOverlap:
    """Follows the arrivals beside which another tenant has live sequences.

    An absence is the time from such an arrival to the next one that finds one other tenant alone.
    """

    def __init__(self) -> None:
        self._last_at = float("-inf")
        self._absences: deque[float] = deque(maxlen=_NUM_ABSENCES)
        self._patience_s = LONGEST_ABSENCE_S

    def note_arrival(self, now: float, ends_absence: bool) -> None:
        """A sequence came, and two tenants or more have live ones now."""
        if ends_absence:
            self._note_absence(now - self._last_at)
        self._last_at = now

    def is_likely(self, now: float) -> bool:
        """Whether the next such arrival is likely to come soon."""
        return now - self._last_at < self._patience_s

    def _note_absence(self, absence_s: float) -> None:
        if absence_s < LONGEST_ABSENCE_S:
            self._absences.append(absence_s)
        else:
            self._absences.clear()
        self._patience_s = LONGEST_ABSENCE_S
        if len(self._absences) >= _LEAST_ABSENCES:
            self._patience_s = min(_MARGIN * max(self._absences), LONGEST_ABSENCE_S)
