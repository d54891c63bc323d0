"""Which running sequences give up their place to one of a higher tier."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.scheduler.policies import Ticket


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
