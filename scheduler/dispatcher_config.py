"""Settings of the central queue."""

from dataclasses import dataclass, field

from shoal.scheduler.preemption import PreemptionConfig
from shoal.scheduler.tiers import DEFAULT_TIER, TenantTable, Tier, TierTable


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """``max_replays`` is how many worker deaths a sequence survives without a token in between.

    The queue is bounded by requests and by known tokens; by either, an empty queue takes one.
    """

    max_queued_requests: int
    max_replays: int = 3
    max_queued_tokens: int | None = None
    policy: str = "fcfs"
    tiers: TierTable = field(default_factory=lambda: TierTable([Tier(DEFAULT_TIER)]))
    tenants: TenantTable = field(default_factory=TenantTable)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)

    def __post_init__(self) -> None:
        if self.max_queued_requests < 1 or self.max_replays < 0:
            raise ValueError("max_queued_requests must be at least 1, max_replays at least 0.")
        if self.max_queued_tokens is not None and self.max_queued_tokens < 1:
            raise ValueError("max_queued_tokens must be at least 1.")
