"""The workers that are ready, and which of them may take a sequence."""

from collections.abc import Iterator

from shoal.scheduler.dispatched import DispatchedSequence
from shoal.scheduler.errors import RequestError, context_exceeded
from shoal.scheduler.worker_ledger import WorkerCapacity, WorkerLedger, WorkerLoad


class Fleet:
    """Owned by the dispatcher. A ``worker_id`` names one process: a restarted one has a new one.

    A worker death is held against every sequence it ran, since the guilty one is unknown, until
    that sequence gives another token. One with ``suspect_after`` deaths against it is a suspect: it
    is handed over only when all others on that worker gave a token, and until it gives one itself
    nothing else is. So a sequence that kills workers is found, and fails alone.
    """

    def __init__(self, suspect_after: int) -> None:
        self._suspect_after = suspect_after
        self._workers: dict[int, WorkerLedger] = {}

    def __iter__(self) -> Iterator[WorkerLedger]:
        return iter(self._workers.values())

    def get(self, worker_id: int) -> WorkerLedger | None:
        return self._workers.get(worker_id)

    def add(self, worker_id: int, capacity: WorkerCapacity) -> None:
        """Take a new, empty worker into use."""
        assert worker_id not in self._workers, f"worker {worker_id} is ready twice"
        self._workers[worker_id] = WorkerLedger(
            worker_id, capacity, WorkerLoad(capacity.num_blocks)
        )

    def remove(self, worker_id: int) -> WorkerLedger | None:
        """Let a worker go; its sequences are the caller's."""
        return self._workers.pop(worker_id, None)

    @property
    def loads(self) -> dict[int, WorkerLoad]:
        """Last report of each worker, by worker_id."""
        return {worker_id: worker.load for worker_id, worker in self._workers.items()}

    @property
    def num_slots(self) -> int:
        return sum(worker.capacity.max_num_seqs for worker in self)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that all workers together hold."""
        return sum(w.capacity.num_blocks * w.capacity.block_size for w in self)

    @property
    def has_free_slot(self) -> bool:
        return any(len(worker.reserved) < worker.capacity.max_num_seqs for worker in self)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether some worker could hold them; true while there is none, as nobody knows yet."""
        return not self._workers or any(w.capacity.can_ever_fit(num_tokens) for w in self)

    def too_long(self, num_tokens: int) -> RequestError:
        """The error of a prompt that no worker could ever hold."""
        longest = max(
            min(w.capacity.max_model_len, w.capacity.num_blocks * w.capacity.block_size)
            for w in self
        )
        return context_exceeded(longest, f"The prompt has {num_tokens}: shorten it.")

    def choose(self, sequence: DispatchedSequence, leaves_reserve: bool) -> WorkerLedger | None:
        """The worker with the most headroom among those that may take the sequence."""
        candidates = [
            worker
            for worker in self
            if worker.accepts(sequence, leaves_reserve) and not self.is_unsafe(worker, sequence)
        ]
        return max(candidates, key=lambda worker: worker.headroom, default=None)

    def is_suspect(self, sequence: DispatchedSequence) -> bool:
        return sequence.num_replays >= self._suspect_after

    def is_unsafe(self, worker: WorkerLedger, sequence: DispatchedSequence) -> bool:
        """Whether a death of the worker, soon after, would leave a suspect and another to blame."""
        return worker.is_isolating or (self.is_suspect(sequence) and bool(worker.unproven))

    def check_integrity(self, sequences: list[DispatchedSequence]) -> None:
        """Assert that each ledger is that of the sequences on its worker. For tests."""
        for worker in self:
            ledger = {
                s.seq_id: worker.capacity.num_blocks_for_next(s)
                for s in sequences
                if s.worker_id == worker.worker_id
            }
            assert worker.reserved == ledger
            assert worker.num_reserved == sum(ledger.values())
            assert len(ledger) <= worker.capacity.max_num_seqs
            assert worker.unproven <= set(ledger)
            assert set(worker.yielding) <= worker.unproven
            assert not worker.is_isolating or len(worker.unproven) == 1
