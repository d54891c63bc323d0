"""The order in which queued sequences are handed to workers: four policies, one interface."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.scheduler.lazy_heap import LazyHeap
from shoal.scheduler.tiers import Tier
from shoal.scheduler.virtual_counters import VirtualCounters

# What a token costs in the fair policies: output tokens take a step each, prompt tokens share one.
PREFILL_WEIGHT = 1.0
DECODE_WEIGHT = 2.0
CACHED_WEIGHT = 0.1
# A whole prompt found in the prefix cache weighs as so many seconds of age.
PREFIX_HIT_SCORE = 0.4
# Priority: a tier that waits is served at least once in so many seconds.
MAX_PASSED_OVER_S = 2.0
# How far, in weighted tokens, a tenant below its share of slots may pass the one served least.
BURST = 256.0
# WFQ: finish times closer than this many weighted tokens count as tied, up to so many of them.
_TIE_QUANTUM = 1.0
_MAX_TIED = 4


@dataclass(slots=True, eq=False)
class Ticket:
    """What a policy knows of one sequence. ``boost`` is how often it was preempted for another."""

    seq_id: int
    order: int  # arrival order, unique
    arrival: float  # seconds
    tenant: str
    tier: Tier
    tenant_weight: float = 1.0
    num_prompt_tokens: int = 1
    expected_outputs: float = 0.0
    prefix_hit: float = 0.0  # expected share of the prompt in the prefix cache
    boost: int = 0
    is_prefill_charged: bool = False

    @property
    def rank(self) -> float:
        """How high it stands; each preemption lifts it as a doubled tier weight would."""
        return float(self.tier.weight * 2**self.boost)

    def score(self, now: float) -> float:
        """The order of sequences that are otherwise equal; the largest first."""
        return self.tier.weight * (now - self.arrival) + PREFIX_HIT_SCORE * self.prefix_hit


def token_cost(prefill_tokens: int, decode_tokens: float, cached_tokens: int) -> float:
    """``cached_tokens`` of the prefill, charged now or before, cost ``CACHED_WEIGHT`` only."""
    discount = (PREFILL_WEIGHT - CACHED_WEIGHT) * cached_tokens
    return PREFILL_WEIGHT * prefill_tokens + DECODE_WEIGHT * decode_tokens - discount


class QueuePolicy(ABC):
    """The queue, in the order of one policy. A ticket that is pushed again keeps its place."""

    preempts = True  # whether its head may take the place of a running sequence of a lower tier
    is_fair = False  # between tenants
    credit = 0.0  # weighted tokens that a fair one lets a tenant catch up after a quiet time

    @abstractmethod
    def push(self, ticket: Ticket, now: float) -> None:
        """Queue a ticket, new or again."""

    @abstractmethod
    def peek(self, now: float) -> Ticket | None:
        """The one to be served next."""

    def peek_other(self, skips: Callable[[str], bool]) -> Ticket | None:
        """The one to be served next but for some tenants; None where that would be unfair."""
        return None

    def lag(self, ticket: Ticket) -> float:
        """Weighted tokens that its tenant got less than another, where the policy counts."""
        return 0.0

    @abstractmethod
    def take(self, ticket: Ticket, now: float) -> None:
        """The ticket, which ``peek`` gave, leaves the queue to be served."""

    @abstractmethod
    def remove(self, ticket: Ticket) -> None:
        """The ticket leaves the queue without service."""

    def charge(  # noqa: B027 - not every policy counts
        self,
        ticket: Ticket,
        prefill_tokens: int = 0,
        decode_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Note tokens that were, or are about to be, computed for a sequence, queued or not."""


class FcfsPolicy(QueuePolicy):
    """First come, first served, whoever it is."""

    preempts = False

    def __init__(self) -> None:
        self._queue: LazyHeap[Ticket] = LazyHeap()

    def push(self, ticket: Ticket, now: float) -> None:
        self._queue.push(ticket.order, ticket.seq_id, ticket)

    def peek(self, now: float) -> Ticket | None:
        return self._queue.peek()

    def take(self, ticket: Ticket, now: float) -> None:
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        self._queue.remove(ticket.seq_id)


@dataclass(slots=True, eq=False)
class _Level:
    """The queued sequences of one rank. ``since``: last served, or when it began to wait."""

    queue: LazyHeap[Ticket] = field(default_factory=LazyHeap)
    since: float = 0.0


class PriorityPolicy(QueuePolicy):
    """The highest tier first; in a tier, first come, first served.

    A tier that waits and was not served for ``MAX_PASSED_OVER_S`` gets the next turn, so none
    starves.
    """

    def __init__(self) -> None:
        self._levels: dict[float, _Level] = {}

    def push(self, ticket: Ticket, now: float) -> None:
        level = self._levels.setdefault(ticket.rank, _Level())
        if not level.queue:
            level.since = now
        level.queue.push(ticket.order, ticket.seq_id, ticket)

    def peek(self, now: float) -> Ticket | None:
        waiting = [(rank, level) for rank, level in self._levels.items() if level.queue]
        if not waiting:
            return None
        _, level = min(waiting, key=lambda item: item[1].since)
        if now - level.since < MAX_PASSED_OVER_S:
            _, level = max(waiting, key=lambda item: item[0])
        return level.queue.peek()

    def take(self, ticket: Ticket, now: float) -> None:
        self._levels[ticket.rank].since = now
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        self._levels[ticket.rank].queue.remove(ticket.seq_id)


class WfqPolicy(QueuePolicy):
    """Weighted fair queuing: each tenant in each tier is a flow, weighted by both their weights.

    The flow whose head would finish first in virtual time is served next. Virtual time is the
    flow's real weighted service, charged as it comes, so a wrong guess of an output's length
    corrects itself. Ties go by ``Ticket.score``, and so does the order in a flow.
    """

    is_fair = True

    def __init__(self) -> None:
        self._counters = VirtualCounters()
        self._flows: dict[str, LazyHeap[Ticket]] = {}  # those that wait
        self._head: Ticket | None = None  # None: not known

    def push(self, ticket: Ticket, now: float) -> None:
        queue = self._flows.setdefault(_flow_key(ticket), LazyHeap())
        # A preempted one first; else the score, which is constant in time within a flow.
        age_key = ticket.arrival - PREFIX_HIT_SCORE * ticket.prefix_hit / ticket.tier.weight
        queue.push((-ticket.boost, age_key, ticket.order), ticket.seq_id, ticket)
        self._note_head(_flow_key(ticket), queue)

    def peek(self, now: float) -> Ticket | None:
        if self._head is None:
            tied = self._counters.least_tied(_TIE_QUANTUM, _MAX_TIED)
            heads = [head for key in tied if (head := self._flows[key].peek()) is not None]
            self._head = max(heads, key=lambda t: (t.score(now), -t.order), default=None)
        return self._head

    def peek_other(self, skips: Callable[[str], bool]) -> Ticket | None:
        key = self._counters.least_other(lambda key: skips(key.partition("\0")[2]), BURST)
        return None if key is None else self._flows[key].peek()

    def lag(self, ticket: Ticket) -> float:
        return self._counters.lag(_flow_key(ticket))

    def take(self, ticket: Ticket, now: float) -> None:
        self._counters.note_taken(_flow_key(ticket))
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        key = _flow_key(ticket)
        queue = self._flows[key]
        queue.remove(ticket.seq_id)
        self._note_head(key, queue)

    def charge(
        self,
        ticket: Ticket,
        prefill_tokens: int = 0,
        decode_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        cost = token_cost(prefill_tokens, decode_tokens, cached_tokens)
        self._counters.charge(_flow_key(ticket), cost / _flow_weight(ticket))
        self._head = None

    def _note_head(self, key: str, queue: LazyHeap[Ticket]) -> None:
        self._head = None
        head = queue.peek()
        if head is None:
            self._counters.leave(key)
            del self._flows[key]
            return
        prefill = 0 if head.is_prefill_charged else head.num_prompt_tokens
        cost = token_cost(prefill, head.expected_outputs, 0) / (1 + head.boost)
        self._counters.enter(key, cost / _flow_weight(head), self.credit / _flow_weight(head))


class VtcPolicy(QueuePolicy):
    """Virtual token counter (Sheng et al., OSDI '24): the least served waiting tenant is next.

    While two tenants of equal weight both wait, their service in weighted tokens differs by at
    most 2 max(PREFILL_WEIGHT * longest prompt, DECODE_WEIGHT * tokens in the batch), and 2 BURST
    where reserves are kept. One that did not use its share before may be ``credit`` ahead. Within
    a tenant the same rule goes over its tiers, by weight, then arrival.
    """

    is_fair = True

    def __init__(self) -> None:
        self._counters = VirtualCounters()
        self._tenants: dict[str, _Tenant] = {}

    def push(self, ticket: Ticket, now: float) -> None:
        tenant = self._tenants.setdefault(ticket.tenant, _Tenant())
        self._counters.enter(ticket.tenant, credit=self.credit / _flow_weight(ticket))
        tenant.push(ticket)

    def peek(self, now: float) -> Ticket | None:
        name = self._counters.least()
        return None if name is None else self._tenants[name].peek()

    def peek_other(self, skips: Callable[[str], bool]) -> Ticket | None:
        name = self._counters.least_other(skips, BURST)
        return None if name is None else self._tenants[name].peek()

    def lag(self, ticket: Ticket) -> float:
        return self._counters.lag(ticket.tenant)

    def take(self, ticket: Ticket, now: float) -> None:
        self._counters.note_taken(ticket.tenant)
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        tenant = self._tenants[ticket.tenant]
        tenant.remove(ticket)
        if not tenant.lanes:
            self._counters.leave(ticket.tenant)
            self._forget_idle()

    def charge(
        self,
        ticket: Ticket,
        prefill_tokens: int = 0,
        decode_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        cost = token_cost(prefill_tokens, decode_tokens, cached_tokens)
        self._counters.charge(ticket.tenant, cost / _flow_weight(ticket))
        tenant = self._tenants.get(ticket.tenant)
        if tenant is not None:
            tenant.counters.charge(ticket.tier.name, cost / ticket.tier.weight)

    def service(self, tenant: str) -> float:
        """The tenant's counter, in weighted tokens."""
        return self._counters.service(tenant)

    def _forget_idle(self) -> None:
        if len(self._tenants) > 2 * self._counters.num_waiting + 2048:
            self._tenants = {name: t for name, t in self._tenants.items() if t.lanes}


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant's queued sequences, one lane a tier, and the tiers' own counters."""

    counters: VirtualCounters = field(default_factory=VirtualCounters)
    lanes: dict[str, LazyHeap[Ticket]] = field(default_factory=dict)  # those that wait

    def push(self, ticket: Ticket) -> None:
        self.lanes.setdefault(ticket.tier.name, LazyHeap()).push(
            (-ticket.boost, ticket.order), ticket.seq_id, ticket
        )
        self.counters.enter(ticket.tier.name)

    def peek(self) -> Ticket | None:
        name = self.counters.least()
        return None if name is None else self.lanes[name].peek()

    def remove(self, ticket: Ticket) -> None:
        lane = self.lanes[ticket.tier.name]
        lane.remove(ticket.seq_id)
        if not lane:
            self.counters.leave(ticket.tier.name)
            del self.lanes[ticket.tier.name]


def _flow_key(ticket: Ticket) -> str:
    return f"{ticket.tier.name}\0{ticket.tenant}"


def _flow_weight(ticket: Ticket) -> float:
    return ticket.tenant_weight * ticket.tier.weight


_POLICIES: dict[str, type[QueuePolicy]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "wfq": WfqPolicy,
    "vtc": VtcPolicy,
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str) -> QueuePolicy:
    """An empty queue under the named policy. Raises ValueError, naming the allowed ones."""
    if name not in _POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICY_NAMES)}.")
    return _POLICIES[name]()
