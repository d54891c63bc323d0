"""The part of each worker that is kept for tenants below their share, while several are about."""

from shoal.scheduler.dispatched import DispatchedSequence
from shoal.scheduler.fleet import Fleet
from shoal.scheduler.policies import DECODE_WEIGHT, QueuePolicy, Ticket
from shoal.scheduler.tenant_ledger import TenantLedger
from shoal.scheduler.worker_ledger import WorkerLedger

# What a tenant may catch up after a quiet time: so much of the tokens that all workers hold, by
# which two tenants' service may differ anyway (see VtcPolicy).
_CREDIT = 1 / 8
_BEHIND = 1 / 4  # of it: who was served so much less than another is urgent


class TenantReserve:
    """Who may use it, and whose prompts go first. Owns nothing; all state is of those given to it.

    Without it a fair policy lets a flooding tenant fill all slots while the others are idle, and
    the next of another waits for one to end.
    """

    def __init__(self, policy: QueuePolicy, tenants: TenantLedger, fleet: Fleet) -> None:
        self._policy = policy
        self._tenants = tenants
        self._fleet = fleet

    def note_capacity(self) -> None:
        """What all workers hold has changed."""
        self._policy.credit = _CREDIT * DECODE_WEIGHT * self._fleet.num_kv_tokens

    def choose_worker(self, sequence: DispatchedSequence, now: float) -> WorkerLedger | None:
        """A worker with room for the sequence, whose urgency there is set; None: there is none."""
        is_kept, tenant = self._is_kept(now), sequence.ticket.tenant
        sequence.urgency = 0
        if is_kept:
            is_behind = self._policy.lag(sequence.ticket) > _BEHIND * self._policy.credit
            is_modest = is_behind or self._tenants.is_modest(sequence.ticket)
            sequence.urgency = 1 if is_modest else -1
        return self._fleet.choose(sequence, is_kept and self._has_its_share(tenant))

    def modest_head(self, now: float) -> Ticket | None:
        """The next sequence of a tenant that may use the reserve, when the head may not."""
        if not (self._is_kept(now) and self._fleet.has_free_slot):
            return None
        return self._policy.peek_other(self._has_its_share)

    def _is_kept(self, now: float) -> bool:
        return self._policy.is_fair and self._tenants.are_several(now)

    def _has_its_share(self, tenant: str) -> bool:
        fleet = self._fleet
        return self._tenants.has_its_share(tenant, fleet.num_slots, fleet.num_kv_tokens)
