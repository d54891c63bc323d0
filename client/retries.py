"""When a request that failed is sent again, and how long that waits."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.client.errors import ShoalError

T = TypeVar("T")
RETRIED_STATUSES = frozenset({429, 502, 503})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most ``max_retries`` further attempts, after busy and unreachable servers only.

    The wait is the one that the server names (``Retry-After``), never less, else it doubles from
    ``first_wait_s``; a random part keeps clients from coming back all at once. A server that
    names a wait above ``max_wait_s`` is not waited for: its error comes out at once.
    """

    max_retries: int = 2
    first_wait_s: float = 0.25
    max_wait_s: float = 30.0

    def wait_s(self, error: ShoalError, attempt: int) -> float | None:
        """How long to wait after the failed ``attempt`` (from 0); None: give up."""
        if attempt >= self.max_retries or error.status not in RETRIED_STATUSES:
            return None
        if error.retry_after_ms is not None:
            told_s = error.retry_after_ms / 1000
            return None if told_s > self.max_wait_s else told_s * random.uniform(1.0, 1.25)
        wait_s: float = min(self.first_wait_s * 2.0**attempt, self.max_wait_s)
        return wait_s * random.uniform(0.5, 1.0)

    async def run(self, work: Callable[[float | None], Awaitable[T]], timeout_s: float | None) -> T:
        """Try until it works. ``work`` gets the seconds that are left; waits count too."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        attempt = 0
        while True:
            left_s = None if deadline is None else deadline - time.monotonic()
            try:
                return await work(left_s)
            except ShoalError as error:
                wait_s = self.wait_s(error, attempt)
                if wait_s is None or (
                    deadline is not None and time.monotonic() + wait_s >= deadline
                ):
                    raise
            await asyncio.sleep(wait_s)
            attempt += 1


NO_RETRIES = RetryPolicy(max_retries=0)
