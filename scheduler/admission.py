"""Who may queue, who must make way, and what the refused are told."""

from dataclasses import dataclass

from shoal.scheduler import refusals
from shoal.scheduler.dispatched import DispatchedSequence
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.drain import DrainEstimate, DrainMeter
from shoal.scheduler.errors import RequestError
from shoal.scheduler.fleet import Fleet
from shoal.scheduler.policies import Ticket
from shoal.scheduler.queue_ledger import QueueLedger
from shoal.scheduler.tenant_ledger import TenantLedger

_DEFAULT_SERVICE_S = 1.0  # assumed time from hand-over to finish until one was seen
_SERVICE_SMOOTHING = 0.1  # weight of the newest sample in the moving average


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What is taken or refused as a whole: all choices of one prompt."""

    ticket: Ticket  # of the first choice
    max_tokens: int  # of each choice; 0: as many as come
    timeout_s: float | None  # from the ticket's arrival
    num_choices: int
    num_prompts: int  # sent together, each by a request of its own

    @property
    def num_prompt_tokens(self) -> int:
        """Of one choice."""
        return self.ticket.num_prompt_tokens

    @property
    def most_tokens(self) -> int:
        return self.num_choices * (self.num_prompt_tokens + self.max_tokens)

    @property
    def least_of_others(self) -> int:
        """Tokens of the prompts that come with it: nothing is known but that they have one each."""
        return (self.num_prompts - 1) * self.num_choices * (1 + self.max_tokens)


class Admission:
    """The sums over queue and tenants that a decision rests on. Owned by the dispatcher.

    The queue is bounded by requests and by known tokens; by either, an empty queue takes one.
    """

    def __init__(self, config: DispatcherConfig, is_fair: bool, fleet: Fleet) -> None:
        self.queue = QueueLedger()
        self.tenants = TenantLedger(config.tenants)
        self.drain_meter = DrainMeter()
        self.is_draining = False  # nothing new is taken
        self._policy = config.policy
        self._is_fair = is_fair
        self._fleet = fleet
        self._max_queued_requests = config.max_queued_requests
        self._max_queued_tokens = config.max_queued_tokens
        self._num_refused = 0  # told to retry, less the places freed since
        self._promised_until = 0.0  # seconds: the last place that a refused client was promised
        self._mean_service_s = _DEFAULT_SERVICE_S

    def admit(self, request: NewRequest, now: float) -> list[Ticket]:
        """What must be shed for a new request. Raises RequestError, and takes nothing, for one that
        cannot or may not be served, or not in time."""
        ticket, num_tokens = request.ticket, request.num_prompt_tokens
        if self.is_draining:
            raise refusals.draining()
        if not self._fleet.can_ever_fit(num_tokens):
            raise self._fleet.too_long(num_tokens)
        self._check_tenant(request)
        self._check_deadline(request, now)
        num_choices = request.num_choices
        return self._make_place(ticket, num_choices, num_choices * num_tokens, now)

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

    def estimate(self, now: float) -> DrainEstimate:
        """How long a new sequence would wait. Holds the live sums, not copies."""
        queue = self.queue
        num_queued = len(queue)
        return DrainEstimate(
            policy=self._policy,
            tokens_per_s=self.drain_meter.tokens_per_s,
            is_saturated=num_queued > 0 or not self._fleet.has_free_slot,
            is_draining=self.is_draining,
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

    def _check_tenant(self, request: NewRequest) -> None:
        """Raise RequestError where the new sequences exceed their tenant's limits."""
        tenant, most_tokens = request.ticket.tenant, request.most_tokens
        num_choices = request.num_choices
        self.tenants.check_together(
            tenant, num_choices, most_tokens, request.num_prompts, request.least_of_others
        )
        self.tenants.check_limits(tenant, num_choices, most_tokens, self._mean_service_s)

    def _check_deadline(self, request: NewRequest, now: float) -> None:
        """Raise RequestError where its time is over, or will be before its turn."""
        ticket, timeout_s = request.ticket, request.timeout_s
        if timeout_s is None:
            return
        left_s = ticket.arrival + timeout_s - now
        if left_s <= 0:
            raise refusals.timed_out(timeout_s)
        wait_s = self.estimate(now).wait_s(ticket.tenant, ticket.tier)
        if wait_s > left_s:
            raise refusals.deadline(wait_s, timeout_s)

    def _make_place(
        self, ticket: Ticket, num_requests: int, num_tokens: int, now: float
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
        victims = self.queue.newest_below(ticket.tier.weight, requests_over, tokens_over)
        if not victims and self._is_fair:
            weight = self.tenants.weight(ticket.tenant)
            victims = self.queue.newest_of_heaviest(
                ticket.tenant, weight, ticket.tier.weight, requests_over, tokens_over, num_requests
            )
        if not victims:
            raise self._queue_full(requests_over > 0, now)
        return victims

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
