"""Keeps steps within memory: smaller ones as it gets short, and again what an allocation failed.

The KV pools are allocated, and touched, at start-up. What still grows with a step is its
activations and logits, and these follow its tokens. So the guard's lever is the step's token
budget; evicting KV blocks would free nothing.
"""

import time
from collections.abc import Callable
from enum import StrEnum

import torch

from shoal.backend.memory_watch import MemoryReading, MemoryWatch
from shoal.scheduler.step_limits import StepLimits

MIB = 2**20
CHECK_INTERVAL_S = 0.1  # a look costs some 0.1 ms, and 0.4 after a pause
IDLE_S = 0.06  # between two calls while nothing runs, at most; a late one makes a step look itself
# Headroom, as a part of the ceiling and in bytes; the smaller of the two is the mark.
HIGH_MARK = (0.05, 2048 * MIB)
CRITICAL_MARK = (0.02, 512 * MIB)
CALM_FACTOR = 1.5  # of the high mark, so that the state does not flutter
MIN_BUDGET_DIVISOR = 16  # high pressure alone never makes a step smaller than budget / 16
RECOVERY_S, MAX_RECOVERY_S = 1.0, 60.0


_SIGNS = ("can't allocate memory", "bad_alloc")  # of torch's CPU allocator, of C++


class Pressure(StrEnum):
    """How short memory is. The next two are: smaller steps; and nothing new is admitted."""

    CALM = "calm"
    HIGH = "high"
    CRITICAL = "critical"


class PressureGuard:
    """Owned by the engine thread: ``before_step`` asks it for limits, the runner reports failures.

    - above the high mark: the token budget is halved at each look, to a sixteenth at least;
    - above the critical mark: halved to one token, nothing is admitted, and what the allocator
      keeps is given back;
    - a failed allocation: the budget becomes half of the tokens that did not fit.

    It doubles again for every calm second; the wait grows with each failure in a row.
    """

    def __init__(
        self,
        memory: MemoryWatch,
        token_budget: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_failed_allocations = 0
        self.num_shrinks = 0
        self.pressure = Pressure.CALM
        self._memory = memory
        self._full_budget = self._budget = token_budget
        self._clock = clock
        self._next_check = self._grow_at = clock()
        self._recovery_s = RECOVERY_S

    @property
    def token_budget(self) -> int:
        return self._budget

    def before_step(self) -> StepLimits:
        """What the next step may do. Reads the memory every 100 ms at most."""
        now = self._clock()
        if now >= self._next_check:
            self._look(now, CHECK_INTERVAL_S)
        return StepLimits(self._budget, admits=self.pressure is not Pressure.CRITICAL)

    def while_idle(self) -> None:
        """Look while nothing waits for it, so that the first step after need not. Called at least
        each ``IDLE_S``; reads the memory every 100 ms at most."""
        now = self._clock()
        if now >= self._next_check - IDLE_S:
            self._look(now, CHECK_INTERVAL_S + IDLE_S)

    def allocation_failed(self, num_tokens: int) -> None:
        """A batch of ``num_tokens`` tokens did not fit; afterwards what can be freed is free."""
        self.num_failed_allocations += 1
        self._shrink(max(1, num_tokens // 2))
        self._recovery_s = min(2 * self._recovery_s, MAX_RECOVERY_S)
        self._grow_at = self._clock() + self._recovery_s
        self._memory.release()

    def _look(self, now: float, valid_s: float) -> None:
        self._next_check = now + valid_s
        self._take(self._memory.read(), now)

    def _take(self, reading: MemoryReading, now: float) -> None:
        self.pressure = self._classify(reading)
        if self.pressure is Pressure.CALM:
            self._grow(now)
            return
        self._grow_at = now + self._recovery_s
        if self.pressure is Pressure.HIGH:
            self._shrink(max(self._budget // 2, self._full_budget // MIN_BUDGET_DIVISOR, 1))
        else:
            self._shrink(max(self._budget // 2, 1))
            self._memory.release()

    def _classify(self, reading: MemoryReading) -> Pressure:
        if reading.headroom < _mark(reading, CRITICAL_MARK):
            return Pressure.CRITICAL
        high = _mark(reading, HIGH_MARK)
        if self.pressure is not Pressure.CALM:
            high *= CALM_FACTOR
        return Pressure.HIGH if reading.headroom < high else Pressure.CALM

    def _shrink(self, budget: int) -> None:
        if budget < self._budget:
            self._budget = budget
            self.num_shrinks += 1

    def _grow(self, now: float) -> None:
        if now < self._grow_at:
            return
        if self._budget == self._full_budget:
            self._recovery_s = RECOVERY_S
            return
        self._budget = min(2 * self._budget, self._full_budget)
        self._grow_at = now + self._recovery_s


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _mark(reading: MemoryReading, mark: tuple[float, int]) -> float:
    part, most = mark
    return min(part * reading.ceiling, most)
