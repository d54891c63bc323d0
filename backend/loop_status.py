"""What the dispatch loop lets other threads know."""

from dataclasses import dataclass, field

from shoal.backend.messages import CacheStatus, MemoryStatus, ParityReport
from shoal.backend.worker_keeper import WorkerState
from shoal.scheduler.drain import DrainEstimate
from shoal.scheduler.tier_counts import TierCounts


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """Replaced as a whole each turn of the loop."""

    turn_at: float = 0.0  # monotonic
    worker_state: WorkerState = WorkerState.LOADING
    heard_at: float = 0.0
    step: int = 0
    step_at: float = 0.0
    free_blocks: int = 0
    total_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    memory: MemoryStatus = MemoryStatus()
    cache: CacheStatus = CacheStatus()
    num_queued: int = 0
    num_live: int = 0
    worker_restarts: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    parity: ParityReport | None = None  # of the worker's self-test
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    drain: DrainEstimate = DrainEstimate()
    tiers: dict[str, TierCounts] = field(default_factory=dict)

    @property
    def num_shed(self) -> int:
        return sum(counts.shed for counts in self.tiers.values())

    @property
    def num_made_way(self) -> int:
        """Preemptions for a higher tier, in the dispatcher."""
        return sum(counts.preempted for counts in self.tiers.values())
