"""What one API key may use: requests and tokens a minute, and requests at once."""

import math
import time
from collections.abc import Callable

from shoal.client.errors import ShoalError
from shoal.client.openai.api_keys import ApiKey

MIN_WAIT_S = 0.05
FIRST_DURATION_S = 1.0  # taken for how long a request runs before one has ended
DURATION_WEIGHT = 0.2  # of the newest in their moving mean


class Bucket:
    """A store of units that fills evenly, ``per_minute`` in a minute, up to that many.

    It may be drawn below nothing, by what turned out larger than it had looked; then it must fill
    up again first.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._time = now

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit; what was used stays used."""
        used = self.per_minute - self._level_at(now)
        self.per_minute = per_minute
        self._level = per_minute - used

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount`` can be taken; 0: now. More than fits counts as all."""
        missing = min(amount, self.per_minute) - self._level_at(now)
        return max(missing, 0.0) * 60 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Use units, or with a negative amount give some back."""
        self._level = min(self._level_at(now) - amount, self.per_minute)

    def _level_at(self, now: float) -> float:
        self._level += (now - self._time) * self.per_minute / 60
        self._level = min(self._level, self.per_minute)
        self._time = now
        return self._level


class KeyAccount:
    """One key's use so far. Outlives changes of the key file."""

    def __init__(
        self, key: ApiKey, share: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``share``: of the key's limits; at least one request at once, and one a minute."""
        self._share = share
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._mean_duration_s = FIRST_DURATION_S
        self.num_open = 0
        self.key = key
        self.configure(key)

    def configure(self, key: ApiKey) -> None:
        """Take over the limits of ``key``; what was used stays used."""
        self.key = key
        self._requests = self._resized(self._requests, key.requests_per_minute)
        self._tokens = self._resized(self._tokens, key.tokens_per_minute)

    def enter(self) -> float:
        """Count a request; returns its start, for ``leave``. Raises ShoalError (429)."""
        now, key = self._clock(), self.key
        most = key.max_concurrent
        if most is not None and self.num_open >= math.ceil(most * self._share):
            wait_s = self._mean_duration_s / key.max_concurrent
            raise _too_much(f"{key.max_concurrent} requests at once", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1, now):
                raise _too_much(f"{key.requests_per_minute} requests a minute", wait_s)
            self._requests.take(1, now)
        self.num_open += 1
        return now

    def leave(self, started: float) -> None:
        """The request has ended."""
        self.num_open -= 1
        duration_s = self._clock() - started
        self._mean_duration_s += DURATION_WEIGHT * (duration_s - self._mean_duration_s)

    def reserve_tokens(self, estimate: int) -> "TokenLease":
        """Set tokens aside until the real number is known. Raises ShoalError (429)."""
        now = self._clock()
        if self._tokens is not None:
            if wait_s := self._tokens.wait_s(max(estimate, 1), now):
                raise _too_much(f"{self.key.tokens_per_minute} tokens a minute", wait_s)
            self._tokens.take(estimate, now)
        return TokenLease(self, estimate)

    def correct_tokens(self, amount: int) -> None:
        """Use so many more, or with a negative amount fewer."""
        if self._tokens is not None:
            self._tokens.take(amount, self._clock())

    def _resized(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        per_minute = math.ceil(per_minute * self._share)
        if bucket is None:
            return Bucket(per_minute, self._clock())
        if bucket.per_minute != per_minute:
            bucket.resize(per_minute, self._clock())
        return bucket


class TokenLease:
    """Tokens that were set aside for one request."""

    def __init__(self, account: KeyAccount, estimate: int) -> None:
        self._account = account
        self._estimate = estimate
        self._settled = False

    def settle(self, num_tokens: int) -> None:
        """Charge what the request really used. Only the first call counts."""
        if not self._settled:
            self._settled = True
            self._account.correct_tokens(num_tokens - self._estimate)


def _too_much(limit: str, wait_s: float) -> ShoalError:
    wait_ms = int(max(wait_s, MIN_WAIT_S) * 1000) + 1
    return ShoalError(
        f"This API key is limited to {limit}. Try again in {wait_ms / 1000:.1f} s.",
        429,
        "rate_limit_exceeded",
        retry_after_ms=wait_ms,
    )
