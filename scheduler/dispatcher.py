"""The central queue: hands sequences to workers, collects their outputs, replays after a crash."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shoal.scheduler import refusals
from shoal.scheduler.block_pool import num_blocks_for
from shoal.scheduler.drain import DrainEstimate, DrainMeter
from shoal.scheduler.errors import RequestError
from shoal.scheduler.lazy_heap import LazyHeap
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.policies import Ticket, make_policy
from shoal.scheduler.preemption import PreemptionConfig, RunningSequence, choose_victims
from shoal.scheduler.queue_ledger import QueueLedger, TenantUse
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.tiers import DEFAULT_TENANT, DEFAULT_TIER, TenantTable, Tier, TierTable

_DEFAULT_SERVICE_S = 1.0  # assumed time from hand-over to finish until one was seen
_SERVICE_SMOOTHING = 0.1  # weight of the newest sample in the moving average
_SUSPECT_AFTER_REPLAYS = 2
_PREEMPT_AGAIN_S = 0.05  # a head that found no victims looks again after so long
# Of a worker's slots and blocks, kept for tenants below their share; see Dispatcher.
_RESERVED_SLOTS = 1 / 8
_RESERVED_BLOCKS = 1 / 16
_RESERVE_AFTER_S = 30.0  # kept for so long after two tenants were there at once


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
    A preempted sequence is queued, and its former worker may yet send what it had computed.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    ticket: Ticket
    timeout_s: float | None = None  # from arrival to the last token
    cache_salt: bytes = b""  # only sequences of equal salts share cached prefixes
    num_replays: int = 0  # worker deaths since its last token
    worker_id: int | None = None  # None: queued
    handed_over: float = 0.0  # seconds, when worker_id is set
    preempted_from: int | None = None  # worker_id, until it is handed over again

    @property
    def arrival(self) -> float:
        return self.ticket.arrival

    @property
    def arrival_order(self) -> int:
        return self.ticket.order

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

    @property
    def num_reserve_slots(self) -> int:
        return int(self.capacity.max_num_seqs * _RESERVED_SLOTS)

    def accepts(self, sequence: DispatchedSequence, leaves_reserve: bool = False) -> bool:
        """Whether the sequence may be handed over now. An idle worker takes what ever fits."""
        if not self.capacity.can_ever_fit(sequence.num_tokens):
            return False
        if not self.reserved:
            return True
        slots = self.capacity.max_num_seqs
        blocks = self.headroom
        if leaves_reserve:
            slots -= self.num_reserve_slots
            blocks -= int(self.capacity.num_blocks * _RESERVED_BLOCKS)
        needed = self.capacity.num_blocks_for_next(sequence.num_tokens)
        return len(self.reserved) < slots and needed <= blocks

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
    policy orders the queue (by default first come, first served); its head waits until a worker
    has room for it, and nothing passes it, so it is never starved. A sequence lost with its worker
    is queued again in its place, with the outputs delivered so far. So is one that was preempted:
    a head of a higher tier may take the place of running sequences, within bounds.

    A fair policy alone lets a flooding tenant fill all slots while the others are idle, and the
    next of another waits for one to end. So, while several tenants are about, a small part of each
    worker is kept free for those that have less than their share of the slots.

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
        self._policy = make_policy(config.policy)
        self._queue = QueueLedger()
        self._uses: dict[str, TenantUse] = {}  # tenants with live sequences
        self._deadlines: LazyHeap[DispatchedSequence] = LazyHeap()
        self._drain_meter = DrainMeter()
        self._workers: dict[int, _Worker] = {}
        self._aborts: list[Command] = []  # to go out with the next poll
        self._num_added = 0
        self._num_refused = 0  # told to retry, less the places freed since
        self._mean_service_s = _DEFAULT_SERVICE_S
        self._in_service: Counter[str] = Counter()  # sequences on workers, by tenant
        self._live_weight = 0.0  # of tenants with live sequences
        self._preempt_again_at: dict[int, float] = {}  # by seq_id, of the last head in vain
        self._several_tenants_at = float("-inf")
        self.num_shed = 0
        self.num_timeouts = 0
        self.num_preempted = 0

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
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        now: float,
        *,
        tenant: str = DEFAULT_TENANT,
        slo_class: str | None = None,
        timeout_s: float | None = None,
        arrival: float | None = None,
        prefix_hit: float = 0.0,
        cache_salt: bytes = b"",
    ) -> list[Delivery]:
        """Queue a sequence; poll next, so that it leaves the queue when a worker has room.

        Raises RequestError, and takes nothing, when draining, full, over its tenant's limits, too
        late, or when no worker could ever hold it. Returns the ends of queued sequences of lower
        tiers that had to make way. ``timeout_s`` counts from ``arrival``, which is now unless told
        otherwise; ``prefix_hit`` is the expected share of cached prompt tokens.
        """
        assert seq_id not in self._sequences, f"sequence {seq_id} was added twice"
        assert prompt_token_ids, "an empty prompt passed intake"
        tier = self.config.tiers.get(slo_class)
        num_tokens = len(prompt_token_ids)
        if self.is_draining:
            raise refusals.draining()
        if not self._can_ever_fit(num_tokens):
            raise self._too_long(num_tokens)
        self._check_tenant(tenant, num_tokens + (sampling.max_tokens or 0))
        arrival = now if arrival is None else arrival
        if timeout_s is not None:
            self._check_deadline(tenant, tier, timeout_s, arrival + timeout_s - now)
        deliveries = self._make_place(tier, num_tokens)
        ticket = Ticket(
            seq_id,
            self._num_added,
            arrival,
            tenant,
            tier,
            self.config.tenants.get(tenant).weight,
            num_tokens,
            self._drain_meter.expected_outputs(sampling.max_tokens),
            prefix_hit,
        )
        sequence = DispatchedSequence(
            seq_id, list(prompt_token_ids), num_tokens, sampling, ticket, timeout_s, cache_salt
        )
        self._num_added += 1
        self._sequences[seq_id] = sequence
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = TenantUse()
            self._live_weight += ticket.tenant_weight
        use.num_requests += 1
        use.num_tokens += num_tokens + (sampling.max_tokens or 0)
        if len(self._uses) > 1:
            self._several_tenants_at = now
        if timeout_s is not None:
            self._deadlines.push(arrival + timeout_s, seq_id, sequence)
        self._enqueue(sequence, now, is_new=True)
        return deliveries

    def estimate(self, now: float) -> DrainEstimate:
        """A snapshot of how long a new sequence would wait, for any thread to ask."""
        estimate = self._estimate()
        return replace(
            estimate,
            work_by_tier=dict(estimate.work_by_tier),
            work_by_tenant=dict(estimate.work_by_tenant),
        )

    def note_refused(self) -> None:
        """Count a request that was refused elsewhere, by an estimate of a full queue."""
        self._num_refused += 1

    def expire(self, now: float) -> list[Delivery]:
        """End the sequences whose time is over; workers are told with the next poll."""
        deliveries = []
        while (sequence := self._deadlines.peek()) is not None:
            if self._deadlines.key_of(sequence.seq_id) > now:
                break
            assert sequence.timeout_s is not None
            self.num_timeouts += 1
            deliveries.append(
                self._fail_and_abort(sequence, refusals.timed_out(sequence.timeout_s))
            )
        return deliveries

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
        hopeless = [
            s
            for s in self._sequences.values()
            if s.worker_id is None and not self._can_ever_fit(s.num_tokens)
        ]
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
            self._leave_service(sequence)
            sequence.num_replays += 1
            self._enqueue(sequence, now)
            if sequence.num_replays > self.config.max_replays:
                message = (
                    f"The worker running this request died {sequence.num_replays} times. "
                    "Other requests go on; this one was given up."
                )
                error = RequestError(message, code="worker_died", status=500)
                deliveries.append(self._fail(sequence, error))
        return deliveries

    def outputs(self, worker_id: int, outputs: Iterable[StepOutput], now: float) -> list[Delivery]:
        """Take a step's outputs. Drops what was delivered before, or is not this worker's."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        deliveries = []
        is_saturated = len(self._queue) > 0
        num_tokens = 0  # prompts count when they gave a first token
        for output in outputs:
            sequence = self._sequences.get(output.seq_id)
            if sequence is not None and worker_id in (
                sequence.worker_id,
                sequence.preempted_from,
            ):
                num_before = sequence.num_output_tokens
                delivery = self._take(worker, sequence, output, now)
                if sequence.num_output_tokens > num_before:
                    num_tokens += 1 if num_before else 1 + sequence.num_prompt_tokens
                if delivery is not None:
                    deliveries.append(delivery)
        self._drain_meter.note_tokens(num_tokens, is_saturated, now)
        return deliveries

    def poll(self, now: float) -> list[Command]:
        """Hand over the head of the queue while a worker has room for it, or makes room."""
        commands, self._aborts = self._aborts, []
        while (ticket := self._policy.peek(now)) is not None:
            sequence = self._sequences[ticket.seq_id]
            worker = self._choose_worker(sequence, now)
            if worker is None and (other := self._modest_head(now)) is not None:
                sequence = other
                worker = self._choose_worker(other, now)
            if worker is None:
                worker, aborts = self._preempt_for(sequence, now)
                commands += aborts
            if worker is None:
                break
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
        queued = {s.seq_id: s.num_tokens for s in self._sequences.values() if s.worker_id is None}
        self._queue.check_integrity(queued)
        self._check_uses()
        for sequence in self._sequences.values():
            assert sequence.ticket.boost <= self.config.preemption.max_preemptions
            assert sequence.preempted_from is None or sequence.worker_id is None
            assert (sequence.seq_id in self._deadlines) == (sequence.timeout_s is not None)
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
            self._note_token(worker, sequence, output)
        reason = output.finish_reason
        if reason is FinishReason.ERROR:
            error = _internal_error(output.error or "The model failed on this request.")
            self._drop_everywhere(sequence)
            return Delivery(
                sequence.seq_id, token, FinishReason.ERROR, output.num_cached_tokens, error
            )
        if reason is not None:
            self._note_service(now - sequence.handed_over)
            self._drain_meter.note_finished(sequence.num_output_tokens)
            self._drop_everywhere(sequence)
        elif token is None:
            return None
        return Delivery(sequence.seq_id, token, reason, output.num_cached_tokens)

    def _choose_worker(self, sequence: DispatchedSequence, now: float) -> _Worker | None:
        """The worker with the most headroom among those that may take the sequence."""
        leaves_reserve = self._keeps_reserve(now) and self._has_its_share(sequence.ticket.tenant)
        candidates = [
            worker
            for worker in self._workers.values()
            if worker.accepts(sequence, leaves_reserve) and not self._is_unsafe(worker, sequence)
        ]
        return max(candidates, key=lambda worker: worker.headroom, default=None)

    def _keeps_reserve(self, now: float) -> bool:
        return self._policy.is_fair and now - self._several_tenants_at < _RESERVE_AFTER_S

    def _has_its_share(self, tenant: str) -> bool:
        num_slots = sum(worker.capacity.max_num_seqs for worker in self._workers.values())
        weight = self.config.tenants.get(tenant).weight
        return self._in_service[tenant] * self._live_weight >= num_slots * weight

    def _modest_head(self, now: float) -> DispatchedSequence | None:
        """The next sequence of a tenant that may use a reserve, when the head may not."""
        if not (self._keeps_reserve(now) and self._has_free_slot()):
            return None
        ticket = self._policy.peek_other(self._has_its_share)
        return None if ticket is None else self._sequences[ticket.seq_id]

    def _is_unsafe(self, worker: _Worker, sequence: DispatchedSequence) -> bool:
        """Whether a death of the worker, soon after, would leave a suspect and another to blame."""
        return worker.is_isolating or (self._is_suspect(sequence) and bool(worker.unproven))

    def _is_suspect(self, sequence: DispatchedSequence) -> bool:
        return sequence.num_replays >= self._suspect_after

    def _hand_over(self, worker: _Worker, sequence: DispatchedSequence, now: float) -> None:
        ticket = sequence.ticket
        self._policy.take(ticket, now)
        self._queue.leave(ticket)
        if not ticket.is_prefill_charged:
            # At once, not when it was computed: else a tenant could take all slots meanwhile.
            ticket.is_prefill_charged = True
            self._policy.charge(ticket, prefill_tokens=sequence.num_prompt_tokens)
        sequence.worker_id = worker.worker_id
        sequence.preempted_from = None
        sequence.handed_over = now
        self._in_service[ticket.tenant] += 1
        worker.take(sequence, self._is_suspect(sequence))
        self._num_refused = max(0, self._num_refused - 1)

    def _enqueue(self, sequence: DispatchedSequence, now: float, is_new: bool = False) -> None:
        """Queue a sequence, new or again in its place."""
        ticket = sequence.ticket
        max_tokens = sequence.sampling.max_tokens
        expected = self._drain_meter.expected_outputs(max_tokens) - sequence.num_output_tokens
        ticket.expected_outputs = max(1.0, expected)
        self._enter_ledger(sequence, is_new)
        self._policy.push(ticket, now)

    def _enter_ledger(self, sequence: DispatchedSequence, is_new: bool = False) -> None:
        work = sequence.num_prompt_tokens + sequence.ticket.expected_outputs
        self._queue.enter(sequence.ticket, sequence.num_tokens, work, is_new)

    def _note_token(
        self, worker: _Worker, sequence: DispatchedSequence, output: StepOutput
    ) -> None:
        """Charge a token that was just appended, and reserve its room."""
        if sequence.worker_id is None:  # preempted meanwhile
            self._queue.leave(sequence.ticket)
            self._enter_ledger(sequence)
        else:
            worker.grow(sequence)
        cached = output.num_cached_tokens if sequence.num_output_tokens == 1 else 0
        self._policy.charge(sequence.ticket, decode_tokens=1, cached_tokens=cached)

    def _preempt_for(
        self, sequence: DispatchedSequence, now: float
    ) -> tuple[_Worker | None, list[Command]]:
        """Have the cheapest running sequences of lower tiers make room, if any can."""
        if not (self._policy.preempts and self.config.preemption.max_preemptions):
            return None, []
        if self._preempt_again_at.get(sequence.seq_id, now) > now:
            return None, []  # in vain a moment ago
        best: tuple[int, _Worker, list[Ticket]] | None = None
        for worker in self._workers.values():
            victims = self._victims(worker, sequence, now)
            cost = sum(self._sequences[victim.seq_id].num_tokens for victim in victims)
            if victims and (best is None or cost < best[0]):
                best = (cost, worker, victims)
        if best is None:
            self._preempt_again_at = {sequence.seq_id: now + _PREEMPT_AGAIN_S}
            return None, []
        _, worker, victims = best
        for victim in victims:
            self._preempt(worker, self._sequences[victim.seq_id], now)
        return worker, [Abort(worker.worker_id, victim.seq_id) for victim in victims]

    def _victims(self, worker: _Worker, sequence: DispatchedSequence, now: float) -> list[Ticket]:
        capacity = worker.capacity
        if not capacity.can_ever_fit(sequence.num_tokens) or self._is_unsafe(worker, sequence):
            return []
        needed = capacity.num_blocks_for_next(sequence.num_tokens)
        sequences = (self._sequences[seq_id] for seq_id in worker.reserved)
        return choose_victims(
            (
                RunningSequence(s.ticket, s.handed_over, s.num_tokens, worker.reserved[s.seq_id])
                for s in sequences
            ),
            sequence.ticket,
            self.config.preemption,
            slots_lacking=len(worker.reserved) + 1 - capacity.max_num_seqs,
            blocks_lacking=needed - worker.headroom,
            now=now,
        )

    def _preempt(self, worker: _Worker, sequence: DispatchedSequence, now: float) -> None:
        """Take a sequence back into the queue. Its worker's last tokens are still taken."""
        worker.release(sequence.seq_id)
        sequence.worker_id = None
        self._leave_service(sequence)
        sequence.preempted_from = worker.worker_id
        sequence.ticket.boost += 1
        self.num_preempted += 1
        self._enqueue(sequence, now)

    def _drop_everywhere(self, sequence: DispatchedSequence) -> None:
        """Remove a sequence that ended on a worker.

        One that was preempted before may have ended in its run before the preemption, and have
        been sent to a worker again, which is then told.
        """
        if sequence.ticket.boost and sequence.worker_id is not None:
            self._aborts.append(Abort(sequence.worker_id, sequence.seq_id))
        self._remove(sequence)

    def _remove(self, sequence: DispatchedSequence) -> None:
        """The one way out, from the queue or from a worker's ledger."""
        del self._sequences[sequence.seq_id]
        self._deadlines.remove(sequence.seq_id)
        ticket = sequence.ticket
        use = self._uses[ticket.tenant]
        use.num_requests -= 1
        use.num_tokens -= sequence.num_prompt_tokens + (sequence.sampling.max_tokens or 0)
        if not use.num_requests:
            del self._uses[ticket.tenant]
            self._live_weight = self._live_weight - ticket.tenant_weight if self._uses else 0.0
        if sequence.worker_id is None:
            self._queue.leave(ticket)
            self._policy.remove(ticket)
            return
        self._leave_service(sequence)
        self._workers[sequence.worker_id].release(sequence.seq_id)

    def _leave_service(self, sequence: DispatchedSequence) -> None:
        tenant = sequence.ticket.tenant
        self._in_service[tenant] -= 1
        if not self._in_service[tenant]:
            del self._in_service[tenant]

    def _fail(self, sequence: DispatchedSequence, error: RequestError) -> Delivery:
        self._remove(sequence)
        return Delivery(sequence.seq_id, None, FinishReason.ERROR, error=error)

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

    def _make_place(self, tier: Tier, num_tokens: int) -> list[Delivery]:
        """Shed what a new sequence needs gone. Raises RequestError when the queue stays full."""
        config = self.config
        requests_over = len(self._queue) + 1 - config.max_queued_requests
        tokens_over = 0
        if config.max_queued_tokens is not None and self._queue:
            tokens_over = self._queue.num_tokens + num_tokens - config.max_queued_tokens
        if requests_over <= 0 and tokens_over <= 0:
            return []
        victims = self._queue.newest_below(tier.weight, requests_over, tokens_over)
        if not victims:
            raise self._queue_full(requests_over > 0)
        self.num_shed += len(victims)
        return [
            self._fail(self._sequences[victim.seq_id], refusals.shed(self._next_retry_ms()))
            for victim in victims
        ]

    def _queue_full(self, is_by_requests: bool) -> RequestError:
        if is_by_requests:
            return refusals.queue_full(self.config.max_queued_requests, self._next_retry_ms())
        assert self.config.max_queued_tokens is not None
        return refusals.queue_full_of_tokens(self.config.max_queued_tokens, self._next_retry_ms())

    def _next_retry_ms(self) -> int:
        """Each refused client is told when the place after those promised before comes free."""
        self._num_refused += 1
        return refusals.retry_ms(self._interval_s * self._num_refused)

    @property
    def _interval_s(self) -> float:
        """From one hand-over to the next while the queue is full."""
        rate = self._drain_meter.tokens_per_s
        if rate and self._queue:
            return self._queue.work / len(self._queue) / rate
        # Little's law: with n sequences in service, one finishes every (service time / n).
        return self._mean_service_s / max(1, len(self._sequences) - len(self._queue))

    def _check_tenant(self, tenant: str, num_tokens: int) -> None:
        settings = self.config.tenants.get(tenant)
        if settings.max_requests is None and settings.max_tokens is None:
            return
        if settings.max_tokens is not None and num_tokens > settings.max_tokens:
            raise refusals.tenant_request_too_large(num_tokens, settings.max_tokens)
        use = self._uses.get(tenant, TenantUse())
        # One of its own must finish; they finish one after the other.
        retry_ms = refusals.retry_ms(self._mean_service_s / max(1, use.num_requests))
        if settings.max_requests is not None and use.num_requests >= settings.max_requests:
            raise refusals.tenant_limit("requests", settings.max_requests, retry_ms)
        if settings.max_tokens is not None and use.num_tokens + num_tokens > settings.max_tokens:
            raise refusals.tenant_limit("tokens", settings.max_tokens, retry_ms)

    def _check_deadline(self, tenant: str, tier: Tier, timeout_s: float, left_s: float) -> None:
        if left_s <= 0:
            self.num_timeouts += 1
            raise refusals.timed_out(timeout_s)
        wait_s = self._estimate().wait_s(tenant, tier)
        if wait_s > left_s:
            raise refusals.deadline(wait_s, timeout_s)

    def _estimate(self) -> DrainEstimate:
        """Holds the live sums, not copies."""
        config, queue = self.config, self._queue
        num_queued = len(queue)
        return DrainEstimate(
            policy=config.policy,
            tokens_per_s=self._drain_meter.tokens_per_s,
            is_saturated=num_queued > 0 or not self._has_free_slot(),
            is_draining=self.is_draining,
            is_full=num_queued >= config.max_queued_requests
            or (
                config.max_queued_tokens is not None
                and queue.num_tokens >= config.max_queued_tokens
            ),
            max_queued_requests=config.max_queued_requests,
            num_queued=num_queued,
            queued_tokens=queue.num_tokens,
            queued_work=queue.work,
            mean_work=queue.work / num_queued if num_queued else 0.0,
            work_by_tier=queue.work_by_tier,
            work_by_tenant=queue.work_by_tenant,
            lowest_weight=queue.lowest_weight,
            interval_s=self._interval_s,
            num_refused=self._num_refused,
        )

    def _has_free_slot(self) -> bool:
        return any(len(w.reserved) < w.capacity.max_num_seqs for w in self._workers.values())

    def _check_uses(self) -> None:
        """Assert that the tenants' sums are those of their live sequences."""
        uses: dict[str, TenantUse] = {}
        for sequence in self._sequences.values():
            use = uses.setdefault(sequence.ticket.tenant, TenantUse())
            use.num_requests += 1
            use.num_tokens += sequence.num_prompt_tokens + (sequence.sampling.max_tokens or 0)
        assert uses == self._uses
        in_service = Counter(
            s.ticket.tenant for s in self._sequences.values() if s.worker_id is not None
        )
        assert in_service == self._in_service

    def _note_service(self, seconds: float) -> None:
        self._mean_service_s += _SERVICE_SMOOTHING * (seconds - self._mean_service_s)


def _internal_error(message: str) -> RequestError:
    return RequestError(message, code="internal_error", status=500)
