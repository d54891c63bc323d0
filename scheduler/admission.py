"""Who may queue, who must make way, and what the refused are told."""

from shoal.scheduler import refusals
from shoal.scheduler.dispatched import DispatchedSequence
from shoal.scheduler.drain import DrainEstimate, DrainMeter
from shoal.scheduler.errors import RequestError
from shoal.scheduler.policies import Ticket
from shoal.scheduler.queue_ledger import QueueLedger
from shoal.scheduler.tenant_ledger import TenantLedger
from shoal.scheduler.tiers import TenantTable, Tier

_DEFAULT_SERVICE_S = 1.0  # assumed time from hand-over to finish until one was seen
_SERVICE_SMOOTHING = 0.1  # weight of the newest sample in the moving average


class Admission:
    """The sums over queue and tenants that a decision rests on. Owned by the dispatcher.

    The queue is bounded by requests and by known tokens; by either, an empty queue takes one.
    """

    def __init__(
        self,
        policy: str,
        is_fair: bool,
        tenants: TenantTable,
        max_queued_requests: int,
        max_queued_tokens: int | None,
    ) -> None:
        self.queue = QueueLedger()
        self.tenants = TenantLedger(tenants)
        self.drain_meter = DrainMeter()
        self._policy = policy
        self._is_fair = is_fair
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._num_refused = 0  # told to retry, less the places freed since
        self._promised_until = 0.0  # seconds: the last place that a refused client was promised
        self._mean_service_s = _DEFAULT_SERVICE_S

    def enqueue(self, sequence: DispatchedSequence, is_new: bool) -> None:
        """Count a sequence that is queued, new or again; guesses how much it has yet to give."""
        max_tokens = sequence.sampling.max_tokens
        expected = self.drain_meter.expected_outputs(max_tokens) - sequence.num_output_tokens
        sequence.ticket.expected_outputs = max(1.0, expected)
        self._enter_queue(sequence, is_new)

    def grow(self, sequence: DispatchedSequence) -> None:
        """A queued sequence has a token more."""
        self.queue.leave(sequence.ticket)
        self._enter_queue(sequence, is_new=False)

    def hand_over(self, ticket: Ticket) -> None:
        """A sequence leaves the queue for a worker: a place is free."""
        self.queue.leave(ticket)
        self.tenants.start_service(ticket)
        self._num_refused = max(0, self._num_refused - 1)

    def note_finished(self, num_outputs: int, service_s: float) -> None:
        """A sequence ended by itself, so long after its hand-over."""
        self._mean_service_s += _SERVICE_SMOOTHING * (service_s - self._mean_service_s)
        self.drain_meter.note_finished(num_outputs)

    def note_refused(self, now: float) -> None:
        """Promise a place to a request that was refused elsewhere, by an estimate."""
        self.next_retry_ms(now)

    def note_empty(self) -> None:
        """Nothing is queued, so whoever comes back finds a place."""
        self._num_refused = 0
        self._promised_until = 0.0

    def check_tenant(
        self,
        tenant: str,
        num_requests: int,
        num_tokens: int,
        num_prompts: int = 1,
        least_others: int = 0,
    ) -> None:
        """Raise RequestError where new sequences of so many tokens exceed a tenant's limits."""
        self.tenants.check_together(tenant, num_requests, num_tokens, num_prompts, least_others)
        self.tenants.check_limits(tenant, num_requests, num_tokens, self._mean_service_s)

    def make_place(
        self, tenant: str, tier: Tier, num_requests: int, num_tokens: int, now: float
    ) -> list[Ticket]:
        """What must be shed for the new sequences of one request, of so many tokens together.

        Raises RequestError when the queue stays full.

        Lower tiers make way; under a fair policy, then the tenant with the most queued.
        """
        requests_over = len(self.queue) + num_requests - self._max_queued_requests
        tokens_over = 0
        if self._max_queued_tokens is not None and self.queue:
            tokens_over = self.queue.num_tokens + num_tokens - self._max_queued_tokens
        if not self.queue or (requests_over <= 0 and tokens_over <= 0):
            return []
        victims = self.queue.newest_below(tier.weight, requests_over, tokens_over)
        if not victims and self._is_fair:
            weight = self.tenants.weight(tenant)
            victims = self.queue.newest_of_heaviest(
                tenant, weight, tier.weight, requests_over, tokens_over, num_requests
            )
        if not victims:
            raise self._queue_full(requests_over > 0, now)
        return victims

    def next_retry_ms(self, now: float) -> int:
        """Each refused client is told when the place after those promised before comes free.

        But no later than one after the last promise, so that a new estimate leaves no gap in which
        nobody comes back.
        """
        interval_s = self._interval_s
        self._num_refused += 1
        wait_s = min(
            self._num_refused * interval_s, max(0.0, self._promised_until - now) + interval_s
        )
        self._promised_until = max(self._promised_until, now + wait_s)
        return refusals.retry_ms(wait_s)

    def estimate(self, now: float, *, has_free_slot: bool, is_draining: bool) -> DrainEstimate:
        """How long a new sequence would wait. Holds the live sums, not copies."""
        queue = self.queue
        num_queued = len(queue)
        return DrainEstimate(
            policy=self._policy,
            tokens_per_s=self.drain_meter.tokens_per_s,
            is_saturated=num_queued > 0 or not has_free_slot,
            is_draining=is_draining,
            is_full=num_queued >= self._max_queued_requests
            or (
                self._max_queued_tokens is not None and queue.num_tokens >= self._max_queued_tokens
            ),
            max_queued_requests=self._max_queued_requests,
            num_queued=num_queued,
            queued_tokens=queue.num_tokens,
            queued_work=queue.work,
            mean_work=queue.mean_work,
            heaviest_work=queue.heaviest[1] if self._is_fair else 0.0,
            work_by_tier=queue.work_by_tier,
            work_by_tenant=queue.work_by_tenant,
            lowest_weight=queue.lowest_weight,
            interval_s=self._interval_s,
            num_refused=min(
                self._num_refused, round(max(0.0, self._promised_until - now) / self._interval_s)
            ),
        )

    def _enter_queue(self, sequence: DispatchedSequence, is_new: bool) -> None:
        work = sequence.num_prompt_tokens + sequence.ticket.expected_outputs
        self.queue.enter(sequence.ticket, sequence.num_tokens, work, is_new)

    def _queue_full(self, is_by_requests: bool, now: float) -> RequestError:
        if is_by_requests:
            return refusals.queue_full(self._max_queued_requests, self.next_retry_ms(now))
        assert self._max_queued_tokens is not None
        return refusals.queue_full_of_tokens(self._max_queued_tokens, self.next_retry_ms(now))

    @property
    def _interval_s(self) -> float:
        """From one hand-over to the next while the queue is full."""
        rate = self.drain_meter.tokens_per_s
        if rate and self.queue:
            return self.queue.work / len(self.queue) / rate
        # Little's law: with n sequences in service, one finishes every (service time / n).
        return self._mean_service_s / max(1, self.tenants.num_in_service)
