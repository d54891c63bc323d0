"""The central queue: hands sequences to workers, collects their outputs, replays after a crash."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.scheduler.block_pool import num_blocks_for
from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason

_DEFAULT_SERVICE_S = 1.0  # assumed time from hand-over to finish until one was seen
_SERVICE_SMOOTHING = 0.1  # weight of the newest sample in the moving average
_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 60_000
_DRAINING_RETRY_MS = 5_000
_SUSPECT_AFTER_REPLAYS = 2


@dataclass(frozen=True, slots=True)
class DispatcherConfig:
    """``max_replays`` is how many worker deaths a sequence survives without a token in between."""

    max_queued_requests: int
    max_replays: int = 3

    def __post_init__(self) -> None:
        if self.max_queued_requests < 1 or self.max_replays < 0:
            raise ValueError("max_queued_requests must be at least 1, max_replays at least 0.")


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What a worker holds when it is empty."""

    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int
    max_model_len: int  # tokens, prompt and output together

    def num_blocks_for_next(self, num_tokens: int) -> int:
        """Blocks of a sequence with ``num_tokens`` known tokens and one more."""
        return num_blocks_for(num_tokens + 1, self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an empty worker could give one more token to ``num_tokens`` known ones."""
        return num_tokens < min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(slots=True, eq=False)
class DispatchedSequence:
    """A live sequence as the dispatcher knows it. Owned by the dispatcher, read by its caller.

    ``token_ids`` is the prompt, then every output that was delivered: what a replay starts from.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival: float  # seconds
    arrival_order: int
    num_replays: int = 0  # worker deaths since its last token
    worker_id: int | None = None  # None: queued
    handed_over: float = 0.0  # seconds, when worker_id is set

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Add:
    """Send this sequence to the worker, at once: its ``token_ids`` grow with its outputs."""

    worker_id: int
    sequence: DispatchedSequence


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the worker to drop this sequence."""

    worker_id: int
    seq_id: int


Command = Add | Abort


@dataclass(frozen=True, slots=True)
class Delivery:
    """News for one sequence's client; the final one, and no other, has a finish_reason."""

    seq_id: int
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: RequestError | None = None  # set when finish_reason is ERROR


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's last own report."""

    free_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    step: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    """One live worker and the ledger of what was handed to it.

    The ledger counts a sequence from its hand-over, for all its known tokens and the next, so it
    needs no report to be right: prefills still growing into their blocks and preempted sequences
    are in it. A report only adds what the ledger cannot explain (aborts on their way, leaks).
    """

    worker_id: int
    capacity: WorkerCapacity
    load: WorkerLoad
    reserved: dict[int, int] = field(default_factory=dict)  # seq_id -> blocks
    num_reserved: int = 0  # sum of ``reserved``
    num_unexplained: int = 0  # blocks in use at the last report beyond ``num_reserved``
    unproven: set[int] = field(default_factory=set)  # gave no token since they were handed over
    is_isolating: bool = False  # the one unproven sequence is a suspect

    @property
    def headroom(self) -> int:
        """Blocks for further sequences; negative when running ones outgrew the pool."""
        return self.capacity.num_blocks - self.num_reserved - self.num_unexplained

    def accepts(self, sequence: DispatchedSequence) -> bool:
        """Whether the sequence may be handed over now. An idle worker takes what ever fits."""
        if not self.capacity.can_ever_fit(sequence.num_tokens):
            return False
        if not self.reserved:
            return True
        needed = self.capacity.num_blocks_for_next(sequence.num_tokens)
        return len(self.reserved) < self.capacity.max_num_seqs and needed <= self.headroom

    def take(self, sequence: DispatchedSequence, is_suspect: bool) -> None:
        """Enter a sequence that is handed over."""
        self.reserved[sequence.seq_id] = 0
        self.resize(sequence)
        self.unproven.add(sequence.seq_id)
        self.is_isolating = is_suspect

    def grow(self, sequence: DispatchedSequence) -> None:
        """Note that the sequence gave a token."""
        self.resize(sequence)
        self.prove(sequence.seq_id)

    def release(self, seq_id: int) -> None:
        """Take the sequence out of the ledger."""
        self.num_reserved -= self.reserved.pop(seq_id)
        self.prove(seq_id)

    def resize(self, sequence: DispatchedSequence) -> None:
        """Reserve what the sequence needs now."""
        num_blocks = self.capacity.num_blocks_for_next(sequence.num_tokens)
        self.num_reserved += num_blocks - self.reserved[sequence.seq_id]
        self.reserved[sequence.seq_id] = num_blocks

    def prove(self, seq_id: int) -> None:
        """Clear a sequence of suspicion; with the last one, the isolation ends."""
        self.unproven.discard(seq_id)
        self.is_isolating = self.is_isolating and bool(self.unproven)

    def report(self, load: WorkerLoad) -> None:
        """Note a report and what it says beyond the ledger."""
        self.load = load
        num_used = self.capacity.num_blocks - load.free_blocks
        self.num_unexplained = max(0, num_used - self.num_reserved)


class Dispatcher:
    """A pure state machine: no thread, no clock, no socket. Times are seconds of one clock.

    Every sequence that ``add`` takes gets exactly one final Delivery, unless it is aborted. The
    queue is first come, first served: the head waits until a worker has room for it, and nothing
    passes it, so it is never starved. A sequence lost with its worker is queued again in its place,
    with the outputs delivered so far.

    A worker death is held against every sequence it ran, since the guilty one is unknown, until
    that sequence gives another token. One with two deaths against it is a suspect: it is handed
    over only when all others on that worker gave a token, and until it gives one itself nothing
    else is. So a sequence that kills workers is found, and fails alone.

    A ``worker_id`` names one process: a restarted worker comes with a new one.
    """

    def __init__(self, config: DispatcherConfig) -> None:
        self.config = config
        self.is_draining = False
        self._suspect_after = max(1, min(_SUSPECT_AFTER_REPLAYS, config.max_replays))
        self._sequences: dict[int, DispatchedSequence] = {}
        self._queue: deque[DispatchedSequence] = deque()  # in arrival order
        self._workers: dict[int, _Worker] = {}
        self._aborts: list[Command] = []  # to go out with the next poll
        self._num_added = 0
        self._num_refused = 0  # told to retry, less the places freed since
        self._mean_service_s = _DEFAULT_SERVICE_S

    @property
    def num_live(self) -> int:
        """Sequences without a final Delivery: queued or on a worker."""
        return len(self._sequences)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def live_seq_ids(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    @property
    def worker_loads(self) -> dict[int, WorkerLoad]:
        """Last report of each ready worker, by worker_id."""
        return {worker_id: worker.load for worker_id, worker in self._workers.items()}

    def add(
        self, seq_id: int, prompt_token_ids: list[int], sampling: SamplingParams, now: float
    ) -> None:
        """Queue a sequence; poll next, so that it leaves the queue when a worker has room.

        Raises RequestError, and takes nothing, when draining, full, or when no worker could ever
        hold it.
        """
        assert seq_id not in self._sequences, f"sequence {seq_id} was added twice"
        assert prompt_token_ids, "an empty prompt passed intake"
        if self.is_draining:
            raise RequestError(
                "The server is shutting down. Retry, or use another server.",
                code="draining",
                status=503,
                retry_after_ms=_DRAINING_RETRY_MS,
            )
        if not self._can_ever_fit(len(prompt_token_ids)):
            raise self._too_long(len(prompt_token_ids))
        if len(self._queue) >= self.config.max_queued_requests:
            raise self._queue_full()
        sequence = DispatchedSequence(
            seq_id, list(prompt_token_ids), len(prompt_token_ids), sampling, now, self._num_added
        )
        self._num_added += 1
        self._sequences[seq_id] = sequence
        self._queue.append(sequence)

    def abort(self, seq_id: int) -> list[Command]:
        """Forget a sequence, in whatever phase; no Delivery follows. Unknown ids are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return []
        worker_id = sequence.worker_id
        self._remove(sequence)
        return [] if worker_id is None else [Abort(worker_id, seq_id)]

    def worker_ready(self, worker_id: int, capacity: WorkerCapacity) -> list[Delivery]:
        """Take a new, empty worker into use. Fails queued sequences that no worker can hold."""
        assert worker_id not in self._workers, f"worker {worker_id} is ready twice"
        self._workers[worker_id] = _Worker(worker_id, capacity, WorkerLoad(capacity.num_blocks))
        hopeless = [s for s in self._queue if not self._can_ever_fit(s.num_tokens)]
        return [self._fail(sequence, self._too_long(sequence.num_tokens)) for sequence in hopeless]

    def worker_status(
        self, worker_id: int, free_blocks: int, num_running: int, num_waiting: int, step: int
    ) -> None:
        """Note a worker's report. Of outputs and status in one message, the outputs go first."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.report(WorkerLoad(free_blocks, num_running, num_waiting, step))

    def worker_dead(self, worker_id: int, now: float) -> list[Delivery]:
        """Queue a dead worker's sequences again; those out of replays fail."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return []
        self._aborts = [abort for abort in self._aborts if abort.worker_id != worker_id]
        deliveries = []
        for seq_id in worker.reserved:
            sequence = self._sequences[seq_id]
            sequence.worker_id = None
            sequence.num_replays += 1
            self._queue.append(sequence)
            if sequence.num_replays > self.config.max_replays:
                message = (
                    f"The worker running this request died {sequence.num_replays} times. "
                    "Other requests go on; this one was given up."
                )
                error = RequestError(message, code="worker_died", status=500)
                deliveries.append(self._fail(sequence, error))
        self._queue = deque(sorted(self._queue, key=lambda sequence: sequence.arrival_order))
        return deliveries

    def outputs(self, worker_id: int, outputs: Iterable[StepOutput], now: float) -> list[Delivery]:
        """Take a step's outputs. Drops what was delivered before, or is not this worker's."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        deliveries = []
        for output in outputs:
            sequence = self._sequences.get(output.seq_id)
            if sequence is not None and sequence.worker_id == worker_id:
                delivery = self._take(worker, sequence, output, now)
                if delivery is not None:
                    deliveries.append(delivery)
        return deliveries

    def poll(self, now: float) -> list[Command]:
        """Hand over the head of the queue while a worker has room for it."""
        commands, self._aborts = self._aborts, []
        while self._queue:
            sequence = self._queue[0]
            worker = self._choose_worker(sequence)
            if worker is None:
                break
            self._queue.popleft()
            self._hand_over(worker, sequence, now)
            commands.append(Add(worker.worker_id, sequence))
        if not self._queue:
            self._num_refused = 0
        return commands

    def drain(self) -> None:
        """Refuse new sequences from now on; those taken go on."""
        self.is_draining = True

    def fail_all(self, error: RequestError) -> list[Delivery]:
        """Fail every live sequence, as at the end; workers are told with the next poll."""
        return [self._fail_and_abort(s, error) for s in tuple(self._sequences.values())]

    def check_integrity(self) -> None:
        """Assert that queue, ledgers and sequences agree. For tests."""
        orders = [sequence.arrival_order for sequence in self._queue]
        assert orders == sorted(set(orders))
        queued = {s.seq_id for s in self._sequences.values() if s.worker_id is None}
        assert queued == {sequence.seq_id for sequence in self._queue}
        for worker in self._workers.values():
            ledger = {
                s.seq_id: worker.capacity.num_blocks_for_next(s.num_tokens)
                for s in self._sequences.values()
                if s.worker_id == worker.worker_id
            }
            assert worker.reserved == ledger
            assert worker.num_reserved == sum(ledger.values())
            assert len(ledger) <= worker.capacity.max_num_seqs
            assert worker.unproven <= set(ledger)
            assert not worker.is_isolating or len(worker.unproven) == 1

    def _take(
        self, worker: _Worker, sequence: DispatchedSequence, output: StepOutput, now: float
    ) -> Delivery | None:
        token = output.token
        if token is not None and output.output_index > sequence.num_output_tokens:
            # A token between was lost, which the link excludes: better an error than a wrong text.
            return self._fail_and_abort(sequence, _internal_error("The output has a gap."))
        if token is not None and output.output_index < sequence.num_output_tokens:
            token = None
        if token is not None:
            sequence.token_ids.append(token.token_id)
            sequence.num_replays = 0
            worker.grow(sequence)
        reason = output.finish_reason
        if reason is FinishReason.ERROR:
            error = _internal_error(output.error or "The model failed on this request.")
            return self._fail(sequence, error, token, output.num_cached_tokens)
        if reason is not None:
            self._note_service(now - sequence.handed_over)
            self._remove(sequence)
        elif token is None:
            return None
        return Delivery(sequence.seq_id, token, reason, output.num_cached_tokens)

    def _choose_worker(self, sequence: DispatchedSequence) -> _Worker | None:
        """The worker with the most headroom among those that may take the sequence."""
        candidates = [
            worker
            for worker in self._workers.values()
            if worker.accepts(sequence) and not self._is_unsafe(worker, sequence)
        ]
        return max(candidates, key=lambda worker: worker.headroom, default=None)

    def _is_unsafe(self, worker: _Worker, sequence: DispatchedSequence) -> bool:
        """Whether a death of the worker, soon after, would leave a suspect and another to blame."""
        return worker.is_isolating or (self._is_suspect(sequence) and bool(worker.unproven))

    def _is_suspect(self, sequence: DispatchedSequence) -> bool:
        return sequence.num_replays >= self._suspect_after

    def _hand_over(self, worker: _Worker, sequence: DispatchedSequence, now: float) -> None:
        sequence.worker_id = worker.worker_id
        sequence.handed_over = now
        worker.take(sequence, self._is_suspect(sequence))
        self._num_refused = max(0, self._num_refused - 1)

    def _remove(self, sequence: DispatchedSequence) -> None:
        """The one way out, from the queue or from a worker's ledger."""
        del self._sequences[sequence.seq_id]
        if sequence.worker_id is None:
            self._queue.remove(sequence)
            return
        self._workers[sequence.worker_id].release(sequence.seq_id)

    def _fail(
        self,
        sequence: DispatchedSequence,
        error: RequestError,
        token: SampledToken | None = None,
        num_cached_tokens: int = 0,
    ) -> Delivery:
        self._remove(sequence)
        return Delivery(sequence.seq_id, token, FinishReason.ERROR, num_cached_tokens, error)

    def _fail_and_abort(self, sequence: DispatchedSequence, error: RequestError) -> Delivery:
        if sequence.worker_id is not None:
            self._aborts.append(Abort(sequence.worker_id, sequence.seq_id))
        return self._fail(sequence, error)

    def _can_ever_fit(self, num_tokens: int) -> bool:
        """Whether some worker could hold them; true while there is none, as nobody knows yet."""
        workers = self._workers.values()
        return not workers or any(w.capacity.can_ever_fit(num_tokens) for w in workers)

    def _too_long(self, num_tokens: int) -> RequestError:
        longest = max(
            min(w.capacity.max_model_len, w.capacity.num_blocks * w.capacity.block_size)
            for w in self._workers.values()
        )
        return RequestError(
            f"The prompt must have at most {longest - 1} tokens, not {num_tokens}. Shorten it.",
            code="context_length_exceeded",
        )

    def _queue_full(self) -> RequestError:
        """Each refused client is told when the place after those promised before comes free."""
        num_handed_over = len(self._sequences) - len(self._queue)
        # Little's law: with n sequences in service, one finishes every (service time / n).
        interval_s = self._mean_service_s / max(1, num_handed_over)
        self._num_refused += 1
        retry_after_ms = int(1000 * interval_s * self._num_refused)
        return RequestError(
            f"The queue is full ({self.config.max_queued_requests} requests). Retry later.",
            code="queue_full",
            status=429,
            retry_after_ms=min(_MAX_RETRY_MS, max(_MIN_RETRY_MS, retry_after_ms)),
        )

    def _note_service(self, seconds: float) -> None:
        self._mean_service_s += _SERVICE_SMOOTHING * (seconds - self._mean_service_s)


def _internal_error(message: str) -> RequestError:
    return RequestError(message, code="internal_error", status=500)
