"""How fast the queue drains: a measured rate, and what a new request may expect from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.scheduler import refusals
from shoal.scheduler.tiers import DEFAULT_TENANT, Tier

_RATE_WINDOW_S = 10.0  # time constant of the moving average
_MIN_EVIDENCE_S = 0.25  # less measured time than this is no evidence
_OUTPUT_SMOOTHING = 0.1  # weight of the newest sample in the moving average
_DEFAULT_OUTPUTS = 64.0  # tokens assumed until a sequence finished


class DrainMeter:
    """Tokens per second, prompts and outputs together, while more work waits than fits.

    Idle time and time with room to spare say nothing of how fast a queue drains, so they are left
    out. Also keeps the mean number of outputs, for guesses at what is to come.
    """

    def __init__(self) -> None:
        self._tokens = 0.0  # both decay together
        self._seconds = 0.0
        self._last = -math.inf
        self._was_saturated = False
        self._mean_outputs = _DEFAULT_OUTPUTS

    @property
    def tokens_per_s(self) -> float | None:
        """None: not measured yet."""
        return self._tokens / self._seconds if self._seconds >= _MIN_EVIDENCE_S else None

    def note_tokens(self, num_tokens: int, is_saturated: bool, now: float) -> None:
        """Tokens that were computed since the last note."""
        elapsed = max(0.0, now - self._last)
        self._last = max(self._last, now)
        is_measured = is_saturated and self._was_saturated
        self._was_saturated = is_saturated
        if not is_measured:
            return
        decay = math.exp(-elapsed / _RATE_WINDOW_S)
        self._tokens = self._tokens * decay + num_tokens
        self._seconds = self._seconds * decay + elapsed

    def note_finished(self, num_outputs: int) -> None:
        self._mean_outputs += _OUTPUT_SMOOTHING * (num_outputs - self._mean_outputs)

    def expected_outputs(self, max_tokens: int | None) -> float:
        """Outputs that a new sequence will likely give."""
        return min(self._mean_outputs, max_tokens or self._mean_outputs)


@dataclass(frozen=True, slots=True)
class DrainEstimate:
    """The queue at one moment; any thread may ask it. Work is in tokens, prompts and outputs."""

    policy: str = "fcfs"
    tokens_per_s: float | None = None  # None: not measured yet
    is_saturated: bool = False  # whether a new sequence would have to wait
    is_draining: bool = False
    is_full: bool = False
    max_queued_requests: int = 0
    num_queued: int = 0
    queued_tokens: int = 0  # known tokens: prompts, and outputs of those to be replayed
    queued_work: float = 0.0
    mean_work: float = 0.0  # of one new sequence
    work_by_tier: Mapping[float, float] = field(default_factory=dict)  # queued, by tier weight
    work_by_tenant: Mapping[str, float] = field(default_factory=dict)  # queued
    heaviest_work: float = 0.0  # queued of the tenant with the most for its weight; 0: not fair
    lowest_weight: float = math.inf  # of the tiers that have sequences to shed
    interval_s: float = 1.0  # from one hand-over to the next
    num_refused: int = 0  # places promised to clients that were refused

    def wait_s(self, tenant: str = DEFAULT_TENANT, tier: Tier | None = None) -> float:
        """Seconds until a new sequence is handed over. 0 when unknown, so nothing is refused."""
        if not self.is_saturated or not self.tokens_per_s:
            return 0.0
        return self._work_ahead(tenant, tier) / self.tokens_per_s

    def retry_after_ms(self, num_ahead: int = 1) -> int:
        """When the ``num_ahead``-th place from now comes free."""
        return refusals.retry_ms(self.interval_s * num_ahead)

    def at_the_door(self, highest_weight: float) -> dict[str, float | bool]:
        """What lets somebody farther out refuse what would find no place, whoever sends it.

        ``places``: requests that the queue takes at once; ``interval_ms``: until the next comes
        free; ``promised_ms``: until the last place comes free that somebody refused was promised.
        ``is_closed``: a new sequence would have to wait, and nothing makes way for any, not even of
        the tier with the ``highest_weight``.
        """
        makes_way = self.policy in ("wfq", "vtc") or self.lowest_weight < highest_weight
        return {
            "is_closed": self.is_saturated and not makes_way and not self.is_draining,
            "places": 0 if self.is_full else self.max_queued_requests - self.num_queued,
            "max_queued_requests": self.max_queued_requests,
            "interval_ms": round(1000 * self.interval_s, 3),
            "promised_ms": round(1000 * self.interval_s * self.num_refused, 3),
        }

    def check(
        self,
        tenant: str,
        tier: Tier,
        timeout_s: float | None,
        num_ahead: int | None = None,
        tenant_weight: float = 1.0,
    ) -> None:
        """Raise the RequestError for a new sequence that cannot be taken, or not in time."""
        if self.is_draining:
            raise refusals.draining()
        if self.is_full and not self._can_displace(tenant, tier, tenant_weight):
            num_ahead = self.num_refused + 1 if num_ahead is None else num_ahead
            raise refusals.queue_full(self.max_queued_requests, self.retry_after_ms(num_ahead))
        if timeout_s is not None and (wait_s := self.wait_s(tenant, tier)) > timeout_s:
            raise refusals.deadline(wait_s, timeout_s)

    def _can_displace(self, tenant: str, tier: Tier, tenant_weight: float) -> bool:
        """Whether something queued would make way, as far as these sums tell."""
        own = self.work_by_tenant.get(tenant, 0.0) + self.mean_work
        return tier.weight > self.lowest_weight or own / tenant_weight < self.heaviest_work

    def _work_ahead(self, tenant: str, tier: Tier | None) -> float:
        if self.policy == "priority" and tier is not None:
            return sum(work for weight, work in self.work_by_tier.items() if weight >= tier.weight)
        if self.policy in ("wfq", "vtc"):
            # Its own work, while each other waiting tenant gets as much, if it has as much.
            own = self.work_by_tenant.get(tenant, 0.0) + self.mean_work
            ahead = sum(min(own, work) for work in self.work_by_tenant.values())
            return min(ahead, self.queued_work)
        return self.queued_work
