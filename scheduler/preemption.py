"""Which running sequences give up their place to one of a higher tier."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.scheduler.dispatched import DispatchedSequence
from shoal.scheduler.fleet import Fleet
from shoal.scheduler.policies import Ticket
from shoal.scheduler.worker_ledger import WorkerLedger

_AGAIN_S = 0.05  # a head that found no victims looks again after so long


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """Bounds on churn. ``max_preemptions`` is per sequence; 0 turns preemption off."""

    max_preemptions: int = 0
    min_run_s: float = 0.5  # from hand-over

    def __post_init__(self) -> None:
        if self.max_preemptions < 0 or self.min_run_s < 0:
            raise ValueError("max_preemptions and min_run_s must be at least 0.")


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """A sequence on a worker, as the choice sees it."""

    ticket: Ticket
    handed_over: float  # seconds
    num_tokens: int  # known: what a recompute costs
    num_blocks: int  # reserved


def choose_victims(
    running: Iterable[RunningSequence],
    head: Ticket,
    config: PreemptionConfig,
    *,
    slots_lacking: int,
    blocks_lacking: int,
    now: float,
) -> list[Ticket]:
    """The fewest cheapest sequences of one worker that make room for ``head``; empty if none do.

    Only those rank below the head's own tier, had their minimum run, and were not preempted too
    often. The lowest rank goes first, and in it the one with the least to recompute.
    """
    eligible = [
        item
        for item in running
        if item.ticket.rank < head.tier.weight
        and item.ticket.boost < config.max_preemptions
        and now - item.handed_over >= config.min_run_s
    ]
    eligible.sort(key=lambda item: (item.ticket.rank, item.num_tokens, -item.ticket.order))
    victims: list[Ticket] = []
    for item in eligible:
        if slots_lacking <= 0 and blocks_lacking <= 0:
            break
        victims.append(item.ticket)
        slots_lacking -= 1
        blocks_lacking -= item.num_blocks
    return victims if slots_lacking <= 0 and blocks_lacking <= 0 else []


class Preemptor:
    """Finds the cheapest running sequences that make room for a head, on any one worker."""

    def __init__(self, config: PreemptionConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._again_at: dict[int, float] = {}  # by seq_id, of the last head in vain

    def choose(
        self, head: DispatchedSequence, live: Mapping[int, DispatchedSequence], now: float
    ) -> tuple[WorkerLedger, list[DispatchedSequence]] | None:
        """A worker and those on it that make way; None if none can, or a moment ago none could."""
        if not self._config.max_preemptions or self._again_at.get(head.seq_id, now) > now:
            return None
        best: tuple[int, WorkerLedger, list[DispatchedSequence]] | None = None
        for worker in self._fleet:
            victims = self._victims(worker, head, live, now)
            cost = sum(victim.num_tokens for victim in victims)
            if victims and (best is None or cost < best[0]):
                best = (cost, worker, victims)
        if best is None:
            self._again_at = {head.seq_id: now + _AGAIN_S}
            return None
        return best[1], best[2]

    def _victims(
        self,
        worker: WorkerLedger,
        head: DispatchedSequence,
        live: Mapping[int, DispatchedSequence],
        now: float,
    ) -> list[DispatchedSequence]:
        capacity = worker.capacity
        if not capacity.can_ever_fit(head.num_tokens) or self._fleet.is_unsafe(worker, head):
            return []
        needed = capacity.num_blocks_for_next(head)
        running = (live[seq_id] for seq_id in worker.reserved)
        victims = choose_victims(
            (
                RunningSequence(s.ticket, s.handed_over, s.num_tokens, worker.reserved[s.seq_id])
                for s in running
            ),
            head.ticket,
            self._config,
            slots_lacking=len(worker.reserved) + 1 - capacity.max_num_seqs,
            blocks_lacking=needed - worker.headroom,
            now=now,
        )
        return [live[victim.seq_id] for victim in victims]
