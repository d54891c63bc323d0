"""What each tenant has live and in service, against its limits and its share."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.scheduler import refusals
from shoal.scheduler.dispatched import DispatchedSequence
from shoal.scheduler.policies import Ticket
from shoal.scheduler.tenant_overlap import TenantOverlap
from shoal.scheduler.tiers import TenantTable


@dataclass(slots=True)
class TenantUse:
    """What a tenant has live, queued or in service."""

    num_requests: int = 0
    num_tokens: int = 0  # prompts and the outputs they may still ask for


class TenantLedger:
    """The live sequences of each tenant, as sums. Owned by the dispatcher. O(1) an operation."""

    def __init__(self, tenants: TenantTable) -> None:
        self._tenants = tenants
        self._uses: dict[str, TenantUse] = {}  # tenants with live sequences
        self._in_service: Counter[str] = Counter()  # sequences on workers
        self._live_weight = 0.0  # of tenants with live sequences
        self._num_in_service = 0
        self._prompts: Counter[str] = Counter()  # tokens of the prompts in service
        self._num_prompt_tokens = 0  # sum of ``_prompts``
        self._overlap = TenantOverlap()

    @property
    def num_in_service(self) -> int:
        """Sequences on workers."""
        return self._num_in_service

    def are_several(self, now: float) -> bool:
        """Whether two tenants or more have live sequences, or are likely to before long."""
        return len(self._uses) > 1 or self._overlap.is_likely(now)

    def weight(self, tenant: str) -> float:
        return self._tenants.get(tenant).weight

    def enter(self, sequence: DispatchedSequence, now: float) -> None:
        """A new sequence is live."""
        ticket = sequence.ticket
        use = self._uses.get(ticket.tenant)
        is_new = use is None
        if use is None:
            use = self._uses[ticket.tenant] = TenantUse()
            self._live_weight += ticket.tenant_weight
        use.num_requests += 1
        use.num_tokens += _most_tokens(sequence)
        if len(self._uses) > 1:
            self._overlap.note_arrival(now, is_new and len(self._uses) == 2)

    def leave(self, sequence: DispatchedSequence) -> None:
        """A sequence, not in service, is live no more."""
        ticket = sequence.ticket
        use = self._uses[ticket.tenant]
        use.num_requests -= 1
        use.num_tokens -= _most_tokens(sequence)
        if not use.num_requests:
            del self._uses[ticket.tenant]
            self._live_weight = self._live_weight - ticket.tenant_weight if self._uses else 0.0

    def start_service(self, ticket: Ticket) -> None:
        """A sequence is handed to a worker."""
        self._in_service[ticket.tenant] += 1
        self._num_in_service += 1
        self._prompts[ticket.tenant] += ticket.num_prompt_tokens
        self._num_prompt_tokens += ticket.num_prompt_tokens

    def end_service(self, ticket: Ticket) -> None:
        """A sequence is on a worker no more."""
        tenant = ticket.tenant
        self._num_in_service -= 1
        self._in_service[tenant] -= 1
        self._prompts[tenant] -= ticket.num_prompt_tokens
        self._num_prompt_tokens -= ticket.num_prompt_tokens
        if not self._in_service[tenant]:
            del self._in_service[tenant]
            del self._prompts[tenant]

    def has_its_share(self, tenant: str, num_slots: int, num_kv_tokens: int) -> bool:
        """Whether the tenant has its weight's share, among those that are about, of slots or KV."""
        weight = self.weight(tenant)
        slots = self._in_service[tenant] * self._live_weight
        tokens = self._prompts[tenant] * self._live_weight
        return slots >= num_slots * weight or tokens >= num_kv_tokens * weight

    def is_modest(self, ticket: Ticket) -> bool:
        """Whether its tenant has less than its share of the prompts in service, this one in it."""
        tokens = self._prompts[ticket.tenant] + ticket.num_prompt_tokens
        total = self._num_prompt_tokens + ticket.num_prompt_tokens
        return tokens * self._live_weight < total * self.weight(ticket.tenant)

    def check_together(
        self,
        tenant: str,
        num_requests: int,
        num_tokens: int,
        num_prompts: int,
        least_others: int,
    ) -> None:
        """Raise RequestError where ``num_prompts`` that come together, each with so many requests,
        can never be taken whole: their sender would come back in vain. The others have
        ``least_others`` tokens."""
        settings = self._tenants.get(tenant)
        most = settings.max_requests
        if num_prompts > 1 and most is not None and num_prompts * num_requests > most:
            raise refusals.tenant_prompts(num_prompts, num_requests, most)
        if settings.max_tokens is not None and num_tokens + least_others > settings.max_tokens:
            raise refusals.tenant_request_too_large(num_tokens + least_others, settings.max_tokens)

    def check_limits(
        self, tenant: str, num_requests: int, num_tokens: int, mean_service_s: float
    ) -> None:
        """Raise RequestError where new sequences of so many tokens exceed the tenant's limits."""
        settings = self._tenants.get(tenant)
        if settings.max_requests is None and settings.max_tokens is None:
            return
        if settings.max_requests is not None and num_requests > settings.max_requests:
            raise refusals.tenant_choices(num_requests, settings.max_requests)
        use = self._uses.get(tenant, TenantUse())
        # One of its own must finish; they finish one after the other.
        retry_ms = refusals.retry_ms(mean_service_s / max(1, use.num_requests))
        most = settings.max_requests
        if most is not None and use.num_requests + num_requests > most:
            raise refusals.tenant_limit("requests", most, retry_ms)
        if settings.max_tokens is not None and use.num_tokens + num_tokens > settings.max_tokens:
            raise refusals.tenant_limit("tokens", settings.max_tokens, retry_ms)

    def check_integrity(self, sequences: Iterable[DispatchedSequence]) -> None:
        """Assert that the sums are those of the live sequences. For tests."""
        uses: dict[str, TenantUse] = {}
        in_service: Counter[str] = Counter()
        prompts: Counter[str] = Counter()
        for sequence in sequences:
            use = uses.setdefault(sequence.ticket.tenant, TenantUse())
            use.num_requests += 1
            use.num_tokens += _most_tokens(sequence)
            if sequence.worker_id is not None:
                in_service[sequence.ticket.tenant] += 1
                prompts[sequence.ticket.tenant] += sequence.num_prompt_tokens
        assert uses == self._uses
        assert in_service == self._in_service
        assert in_service.total() == self._num_in_service
        assert prompts == self._prompts
        assert prompts.total() == self._num_prompt_tokens


def _most_tokens(sequence: DispatchedSequence) -> int:
    return sequence.num_prompt_tokens + (sequence.sampling.max_tokens or 0)
