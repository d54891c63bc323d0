"""What became of the requests of one tier: running totals."""

from collections import Counter
from dataclasses import dataclass, field

from shoal.scheduler.tiers import Tier


@dataclass(slots=True)
class TierCounts:
    """Totals never go back. The targets count sequences with a first token, or that finished."""

    shed: int = 0
    timed_out: int = 0
    preempted: int = 0  # made way for a higher tier
    replayed: int = 0  # were on a worker that died
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by code

    def note_first_token(self, tier: Tier, ttft_s: float) -> None:
        if tier.ttft_ms is None:
            return
        if 1000 * ttft_s <= tier.ttft_ms:
            self.ttft_met += 1
        else:
            self.ttft_missed += 1

    def note_finished(self, tier: Tier, tpot_s: float) -> None:
        """``tpot_s``: mean time between the tokens of a sequence that finished."""
        if tier.tpot_ms is None:
            return
        if 1000 * tpot_s <= tier.tpot_ms:
            self.tpot_met += 1
        else:
            self.tpot_missed += 1

    def copy(self) -> "TierCounts":
        return TierCounts(
            self.shed,
            self.timed_out,
            self.preempted,
            self.replayed,
            self.ttft_met,
            self.ttft_missed,
            self.tpot_met,
            self.tpot_missed,
            Counter(self.refused),
        )
