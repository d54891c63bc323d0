"""What waits and what of it can be shed: the sums that admission decides by."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.scheduler.policies import Ticket

Key = TypeVar("Key")


@dataclass(slots=True, eq=False)
class _Queued:
    ticket: Ticket
    num_tokens: int
    work: float


@dataclass(slots=True)
class QueueLedger:
    """Sums over queued sequences, kept as they come and go. O(1) an operation."""

    num_tokens: int = 0  # known tokens
    work: float = 0.0  # tokens, expected outputs too
    work_by_tier: dict[float, float] = field(default_factory=dict)  # by tier weight
    work_by_tenant: dict[str, float] = field(default_factory=dict)
    _entries: dict[int, _Queued] = field(default_factory=dict)
    # By tier weight and by tenant, oldest first. What was in service once is not shed: its client
    # has tokens.
    _sheddable: dict[float, dict[int, Ticket]] = field(default_factory=dict)
    _sheddable_of: dict[str, dict[int, Ticket]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def lowest_weight(self) -> float:
        """The weight of the lowest tier with something to shed."""
        return min(self._sheddable, default=float("inf"))

    def enter(self, ticket: Ticket, num_tokens: int, work: float, is_new: bool) -> None:
        """A sequence is queued, new or again."""
        assert ticket.seq_id not in self._entries
        self._entries[ticket.seq_id] = _Queued(ticket, num_tokens, work)
        self._add(ticket, num_tokens, work)
        if is_new:
            self._sheddable.setdefault(ticket.tier.weight, {})[ticket.seq_id] = ticket
            self._sheddable_of.setdefault(ticket.tenant, {})[ticket.seq_id] = ticket

    def leave(self, ticket: Ticket) -> None:
        """A sequence is queued no more."""
        entry = self._entries.pop(ticket.seq_id)
        self._add(ticket, -entry.num_tokens, -entry.work)
        _take_out(self._sheddable, ticket.tier.weight, ticket.seq_id)
        _take_out(self._sheddable_of, ticket.tenant, ticket.seq_id)
        if not self._entries:  # rounding errors end with the last entry
            self.work = 0.0
            self.work_by_tier.clear()
            self.work_by_tenant.clear()

    def newest_below(self, weight: float, num_requests: int, num_tokens: int) -> list[Ticket]:
        """What to shed: from the lowest tier below ``weight`` up, each newest first.

        Enough to free ``num_requests`` places and ``num_tokens`` tokens, or nothing.
        """
        tickets = (
            ticket
            for tier_weight in sorted(self._sheddable)
            if tier_weight < weight
            for ticket in reversed(self._sheddable[tier_weight].values())
        )
        return self._enough(tickets, num_requests, num_tokens)

    def newest_of_heaviest(
        self,
        tenant: str,
        tenant_weight: float,
        weight: float,
        num_requests: int,
        num_tokens: int,
        num_new: int = 1,
    ) -> list[Ticket]:
        """What to shed for ``tenant``: of the tenant with the most work queued for its weight.

        As ``newest_below``, but of tiers up to ``weight``; nothing where it has no more than
        ``tenant`` would have with ``num_new`` more.
        """
        own = (self.work_by_tenant.get(tenant, 0.0) + num_new * self.mean_work) / tenant_weight
        name, load = self.heaviest
        if name == tenant or load <= own:
            return []
        tickets = (
            ticket
            for ticket in reversed(self._sheddable_of[name].values())
            if ticket.tier.weight <= weight
        )
        return self._enough(tickets, num_requests, num_tokens)

    @property
    def mean_work(self) -> float:
        """Of one queued sequence."""
        return self.work / len(self._entries) if self._entries else 0.0

    @property
    def heaviest(self) -> tuple[str, float]:
        """The tenant with the most work queued for its weight, and how much. O(tenants)."""
        loads = (
            (self.work_by_tenant.get(name, 0.0) / next(iter(tickets.values())).tenant_weight, name)
            for name, tickets in self._sheddable_of.items()
        )
        load, name = max(loads, default=(0.0, ""))
        return name, load

    def _enough(
        self, tickets: Iterable[Ticket], num_requests: int, num_tokens: int
    ) -> list[Ticket]:
        """The first of ``tickets`` that together free so much; none where all do not."""
        chosen: list[Ticket] = []
        for ticket in tickets:
            if num_requests <= 0 and num_tokens <= 0:
                break
            chosen.append(ticket)
            num_requests -= 1
            num_tokens -= self._entries[ticket.seq_id].num_tokens
        return chosen if num_requests <= 0 and num_tokens <= 0 else []

    def check_integrity(self, queued: dict[int, int]) -> None:
        """Assert that the sums are those of ``queued``: known tokens by seq_id. For tests."""
        assert {seq_id: entry.num_tokens for seq_id, entry in self._entries.items()} == queued
        assert self.num_tokens == sum(queued.values())
        total = sum(entry.work for entry in self._entries.values())
        assert abs(self.work - total) < 1e-6 * max(1.0, total)
        for tenant, tickets in self._sheddable_of.items():
            assert tickets
            assert all(ticket.tenant == tenant for ticket in tickets.values())
        assert sum(map(len, self._sheddable_of.values())) == sum(map(len, self._sheddable.values()))
        for weight, tickets in self._sheddable.items():
            assert tickets
            assert all(self._entries[seq_id].ticket is t for seq_id, t in tickets.items())
            assert all(ticket.tier.weight == weight for ticket in tickets.values())

    def _add(self, ticket: Ticket, num_tokens: int, work: float) -> None:
        self.num_tokens += num_tokens
        self.work += work
        weight, tenant = ticket.tier.weight, ticket.tenant
        self.work_by_tier[weight] = self.work_by_tier.get(weight, 0.0) + work
        left = self.work_by_tenant.get(tenant, 0.0) + work
        if left > 1e-6:
            self.work_by_tenant[tenant] = left
        else:
            self.work_by_tenant.pop(tenant, None)


def _take_out(groups: dict[Key, dict[int, Ticket]], key: Key, seq_id: int) -> None:
    """Remove from a group, and the group when it is empty."""
    group = groups.get(key)
    if group is not None:
        group.pop(seq_id, None)
        if not group:
            del groups[key]
