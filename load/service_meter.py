"""How much service each tenant got while all of them wanted some."""

from collections.abc import Iterable

# As in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
PREFILL_TOKEN = 1.0
DECODE_TOKEN = 2.0


class ServiceMeter:
    """Counts service only while every tenant has a request queued: else nobody goes short.

    Prefill is counted when it ends, with the first token.
    """

    def __init__(self, tenants: Iterable[str]) -> None:
        self.contended: dict[str, float] = dict.fromkeys(sorted(tenants), 0.0)
        self.contended_s = 0.0
        self._num_queued = dict.fromkeys(self.contended, 0)
        self._num_idle = len(self.contended)  # tenants with nothing queued
        self._since = 0.0

    @property
    def is_contended(self) -> bool:
        return self._num_idle == 0 and len(self.contended) > 1

    def waits(self, tenant: str, now: float) -> None:
        """A request of the tenant joins the queue."""
        self._num_queued[tenant] += 1
        if self._num_queued[tenant] == 1:
            self._num_idle -= 1
            if self.is_contended:
                self._since = now

    def stops_waiting(self, tenant: str, now: float) -> None:
        """A request of the tenant leaves the queue, in whatever way."""
        assert self._num_queued[tenant] > 0, f"tenant {tenant} has nothing queued"
        if self._num_queued[tenant] == 1 and self.is_contended:
            self.contended_s += now - self._since
        self._num_queued[tenant] -= 1
        if self._num_queued[tenant] == 0:
            self._num_idle += 1

    def prefilled(self, tenant: str, num_tokens: int) -> None:
        """A prompt was computed, its cached tokens aside."""
        if self.is_contended:
            self.contended[tenant] += PREFILL_TOKEN * num_tokens

    def decoded(self, tenant: str) -> None:
        """A token was given."""
        if self.is_contended:
            self.contended[tenant] += DECODE_TOKEN


def jain_index(values: Iterable[float]) -> float | None:
    """1 when all are equal, 1/n when one has everything; None when there is nothing to share."""
    shares = list(values)
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else None


class PauseMeter:
    """The longest time in which no request of a tier got a token, while requests arrive.

    ``end``: of the arrivals. A tier's time begins with its first request.
    """

    def __init__(self, end: float) -> None:
        self._end = end
        self._last: dict[str, float] = {}  # token, or first request, by tier
        self._longest: dict[str, float] = {}

    def arrives(self, slo_class: str, now: float) -> None:
        self._last.setdefault(slo_class, now)

    def token(self, slo_class: str, now: float) -> None:
        last, now = self._last[slo_class], min(now, self._end)
        self._longest[slo_class] = max(self._longest.get(slo_class, 0.0), now - last)
        self._last[slo_class] = max(last, now)

    @property
    def longest(self) -> dict[str, float]:
        """Seconds by tier."""
        return {
            name: max(self._longest.get(name, 0.0), self._end - last)
            for name, last in self._last.items()
        }
