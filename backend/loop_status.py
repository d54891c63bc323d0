"""What the dispatch loop lets other threads know, and the counts that it is made of."""

from collections import Counter
from dataclasses import dataclass, field

from shoal.backend.messages import (
    CacheStatus,
    MemoryStatus,
    ParityReport,
    WorkerReady,
    WorkerStatus,
)
from shoal.backend.worker_keeper import WorkerKeeper, WorkerState
from shoal.scheduler.dispatcher import Dispatcher
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


class LoopCounts:
    """What happened so far, over all workers. Owned by the dispatch loop."""

    def __init__(self) -> None:
        self.step_at = 0.0  # when a step's results came last
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.parity: ParityReport | None = None  # of the first worker, which alone is tested
        self._worker: WorkerStatus | None = None  # the running one's last report
        self._steps_before = 0  # of workers that are gone
        self._preemptions_before = 0
        self._memory_before = MemoryStatus()
        self._cache_before = CacheStatus()

    def take(self, status: WorkerStatus) -> None:
        """A worker's report, whose counts are its own."""
        self._worker = status

    def note_worker_gone(self) -> None:
        """Keep what it has counted."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._steps_before += worker.step
        self._preemptions_before += worker.num_preemptions
        self._memory_before = worker.memory.with_totals_of(self._memory_before)
        self._cache_before = worker.cache.with_totals_of(self._cache_before)

    def status(
        self,
        now: float,
        keeper: WorkerKeeper,
        dispatcher: Dispatcher,
        ready: WorkerReady | None,
        num_live: int,
    ) -> LoopStatus:
        """``ready``: what the latest worker can take."""
        worker = self._worker
        memory = worker.memory if worker else MemoryStatus()
        cache = worker.cache if worker else CacheStatus()
        return LoopStatus(
            turn_at=now,
            worker_state=keeper.state,
            heard_at=keeper.heard_at,
            step=self._steps_before + (worker.step if worker else 0),
            step_at=self.step_at,
            free_blocks=worker.free_blocks if worker else 0,
            total_blocks=ready.num_blocks if ready else 0,
            num_running=worker.num_running if worker else 0,
            num_waiting=worker.num_waiting if worker else 0,
            num_preemptions=self._preemptions_before + (worker.num_preemptions if worker else 0),
            memory=memory.with_totals_of(self._memory_before),
            cache=cache.with_totals_of(self._cache_before),
            num_queued=dispatcher.num_queued,
            num_live=num_live,
            worker_restarts=keeper.num_restarts,
            max_model_len=ready.max_model_len if ready else 0,
            max_num_seqs=ready.max_num_seqs if ready else 0,
            parity=self.parity,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            finished=dict(self.finished),
            drain=dispatcher.estimate(now),
            tiers=dispatcher.counts,
        )
