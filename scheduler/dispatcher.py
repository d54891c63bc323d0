"""The central queue: hands sequences to workers, collects their outputs, replays after a crash."""

from collections.abc import Iterable
from dataclasses import replace

from shoal.scheduler import refusals
from shoal.scheduler.admission import Admission, NewRequest
from shoal.scheduler.dispatched import Abort, Add, Command, Delivery, DispatchedSequence
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.drain import DrainEstimate
from shoal.scheduler.errors import RequestError
from shoal.scheduler.fleet import Fleet
from shoal.scheduler.images import PromptImage
from shoal.scheduler.lazy_heap import LazyHeap
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.policies import Ticket, make_policy
from shoal.scheduler.preemption import Preemptor
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.tenant_reserve import TenantReserve
from shoal.scheduler.tier_counts import TierCounts
from shoal.scheduler.tiers import DEFAULT_TENANT, Tier
from shoal.scheduler.worker_ledger import WorkerCapacity, WorkerLedger, WorkerLoad

_SUSPECT_AFTER_REPLAYS = 2


class Dispatcher:
    """A pure state machine: no thread, no clock, no socket. Times are seconds of one clock.

    Every sequence that ``add`` takes gets exactly one final Delivery, unless it is aborted. The
    policy orders the queue (by default first come, first served); its head waits until a worker
    has room for it, and nothing passes it, so it is never starved. A sequence lost with its worker
    is queued again in its place, with the outputs delivered so far. So is one that was preempted:
    a head of a higher tier may take the place of running sequences, within bounds.

    While several tenants are about, a small part of each worker is kept free for those that have
    less than their share of the slots, and workers compute the prompts of those far below it first:
    see ``TenantReserve``.

    A sequence that kills workers is found, and fails alone: see ``Fleet``.
    """

    def __init__(self, config: DispatcherConfig) -> None:
        self.config = config
        self._sequences: dict[int, DispatchedSequence] = {}
        self._policy = make_policy(config.policy)
        self._fleet = Fleet(max(1, min(_SUSPECT_AFTER_REPLAYS, config.max_replays)))
        self._admission = Admission(config, self._policy.is_fair, self._fleet)
        self._reserve = TenantReserve(self._policy, self._admission.tenants, self._fleet)
        self._preemptor = Preemptor(config.preemption, self._fleet)
        self._deadlines: LazyHeap[DispatchedSequence] = LazyHeap()
        self._aborts: list[Command] = []  # to go out with the next poll
        self._num_added = 0
        self._counts = {name: TierCounts() for name in config.tiers.names}

    @property
    def counts(self) -> dict[str, TierCounts]:
        """What became of the requests of each tier so far; copies."""
        return {name: counts.copy() for name, counts in self._counts.items()}

    @property
    def num_shed(self) -> int:
        return sum(counts.shed for counts in self._counts.values())

    @property
    def num_timeouts(self) -> int:
        return sum(counts.timed_out for counts in self._counts.values())

    @property
    def num_preempted(self) -> int:
        return sum(counts.preempted for counts in self._counts.values())

    @property
    def num_live(self) -> int:
        """Sequences without a final Delivery: queued or on a worker."""
        return len(self._sequences)

    @property
    def num_queued(self) -> int:
        return len(self._admission.queue)

    @property
    def live_seq_ids(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    @property
    def worker_loads(self) -> dict[int, WorkerLoad]:
        """Last report of each ready worker, by worker_id."""
        return self._fleet.loads

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
        fork_of: int | None = None,
        num_choices: int = 1,
        num_prompts: int = 1,
        images: tuple[PromptImage, ...] = (),
    ) -> list[Delivery]:
        """Queue a sequence; poll next, so that it leaves the queue when a worker has room.

        Raises RequestError, and takes nothing, when draining, full, over its tenant's limits, too
        late, or when no worker could ever hold it. Returns the ends of queued sequences of lower
        tiers that had to make way. ``timeout_s`` counts from ``arrival``, which is now unless told
        otherwise; ``prefix_hit`` is the expected share of cached prompt tokens. ``fork_of`` names a
        sequence of the same prompt, which a worker then computes once for both. A request of
        several choices is taken as a whole: the first is added for all ``num_choices``, and the
        others, at once, with 0. ``num_prompts`` are sent together, each by a request of its own.
        """
        assert seq_id not in self._sequences, f"sequence {seq_id} was added twice"
        assert prompt_token_ids, "an empty prompt passed intake"
        tier = self.config.tiers.get(slo_class)
        ticket = Ticket(
            seq_id,
            self._num_added,
            now if arrival is None else arrival,
            tenant,
            tier,
            self._admission.tenants.weight(tenant),
            len(prompt_token_ids),
            prefix_hit=prefix_hit,
        )
        deliveries: list[Delivery] = []
        if num_choices:
            request = NewRequest(
                ticket, sampling.max_tokens or 0, timeout_s, num_choices, num_prompts
            )
            deliveries = self._admit(request, now)
        sequence = DispatchedSequence(
            seq_id,
            list(prompt_token_ids),
            len(prompt_token_ids),
            sampling,
            ticket,
            timeout_s,
            cache_salt,
            tpot_s=None if tier.tpot_ms is None else tier.tpot_ms / 1000,
            fork_of=fork_of,
            images=images,
        )
        self._num_added += 1
        self._sequences[seq_id] = sequence
        self._admission.tenants.enter(sequence, now)
        if timeout_s is not None:
            self._deadlines.push(ticket.arrival + timeout_s, seq_id, sequence)
        self._enqueue(sequence, now, is_new=True)
        return deliveries

    def estimate(self, now: float) -> DrainEstimate:
        """A snapshot of how long a new sequence would wait, for any thread to ask."""
        estimate = self._admission.estimate(now)
        return replace(
            estimate,
            work_by_tier=dict(estimate.work_by_tier),
            work_by_tenant=dict(estimate.work_by_tenant),
        )

    def note_refused(self, tier: Tier, code: str, was_full: bool, now: float) -> None:
        """Count a request that was refused elsewhere; ``was_full``: it was told when to retry."""
        self._counts[tier.name].refused[code] += 1
        if was_full:
            self._admission.note_refused(now)

    def note_full(self, tier: Tier, count: int) -> None:
        """Count requests that somebody farther out refused, who told each when to retry."""
        self._counts[tier.name].refused["queue_full"] += count

    def expire(self, now: float) -> list[Delivery]:
        """End the sequences whose time is over; workers are told with the next poll."""
        deliveries = []
        while (sequence := self._deadlines.peek()) is not None:
            if self._deadlines.key_of(sequence.seq_id) > now:
                break
            assert sequence.timeout_s is not None
            self._counts_of(sequence).timed_out += 1
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
        self._fleet.add(worker_id, capacity)
        self._reserve.note_capacity()
        hopeless = [
            s
            for s in self._sequences.values()
            if s.worker_id is None and not self._fleet.can_ever_fit(s.num_tokens)
        ]
        return [
            self._fail(sequence, self._fleet.too_long(sequence.num_tokens)) for sequence in hopeless
        ]

    def worker_status(
        self, worker_id: int, free_blocks: int, num_running: int, num_waiting: int, step: int
    ) -> None:
        """Note a worker's report. Of outputs and status in one message, the outputs go first."""
        worker = self._fleet.get(worker_id)
        if worker is not None:
            worker.report(WorkerLoad(free_blocks, num_running, num_waiting, step))

    def worker_dead(self, worker_id: int, now: float) -> list[Delivery]:
        """Queue a dead worker's sequences again; those out of replays fail."""
        worker = self._fleet.remove(worker_id)
        if worker is None:
            return []
        self._aborts = [abort for abort in self._aborts if abort.worker_id != worker_id]
        deliveries = []
        for seq_id in worker.reserved:
            sequence = self._sequences[seq_id]
            sequence.worker_id = None
            self._admission.tenants.end_service(sequence.ticket)
            sequence.num_replays += 1
            self._counts_of(sequence).replayed += 1
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
        worker = self._fleet.get(worker_id)
        if worker is None:
            return []
        deliveries = []
        is_saturated = self.num_queued > 0
        num_tokens = 0  # prompts count when they gave a first token
        for output in outputs:
            sequence = self._sequences.get(output.seq_id)
            if sequence is None:
                continue
            if worker_id not in (sequence.worker_id, sequence.preempted_from):
                continue
            delivery = self._take(worker, sequence, output, now)
            if delivery is None:
                continue
            deliveries.append(delivery)
            if delivery.token is not None:
                num_tokens += 1 if output.output_index else 1 + sequence.num_prompt_tokens
        self._admission.drain_meter.note_tokens(num_tokens, is_saturated, now)
        return deliveries

    def poll(self, now: float) -> list[Command]:
        """Hand over the head of the queue while a worker has room for it, or makes room."""
        commands = self._take_aborts()
        while (ticket := self._policy.peek(now)) is not None:
            sequence = self._sequences[ticket.seq_id]
            worker = self._reserve.choose_worker(sequence, now)
            if worker is None and (other := self._reserve.modest_head(now)) is not None:
                sequence = self._sequences[other.seq_id]
                worker = self._reserve.choose_worker(sequence, now)
            if worker is None and (worker := self._preempt_for(sequence, now)) is not None:
                commands += self._take_aborts()
            if worker is None:
                break
            self._hand_over(worker, sequence, now)
            commands.append(Add(worker.worker_id, sequence))
        if not self.num_queued:
            self._admission.note_empty()
        return commands

    def drain(self) -> None:
        """Refuse new sequences from now on; those taken go on."""
        self._admission.is_draining = True

    def fail_all(self, error: RequestError) -> list[Delivery]:
        """Fail every live sequence, as at the end; workers are told with the next poll."""
        return [self._fail_and_abort(s, error) for s in tuple(self._sequences.values())]

    def check_integrity(self) -> None:
        """Assert that queue, ledgers and sequences agree. For tests."""
        queued = {s.seq_id: s.num_tokens for s in self._sequences.values() if s.worker_id is None}
        self._admission.queue.check_integrity(queued)
        self._admission.tenants.check_integrity(self._sequences.values())
        self._fleet.check_integrity(list(self._sequences.values()))
        for sequence in self._sequences.values():
            assert sequence.ticket.boost <= self.config.preemption.max_preemptions
            assert sequence.preempted_from is None or sequence.worker_id is None
            assert (sequence.seq_id in self._deadlines) == (sequence.timeout_s is not None)

    def _admit(self, request: NewRequest, now: float) -> list[Delivery]:
        """Shed what a new request needs gone. Raises RequestError, and counts it, for one that is
        refused."""
        try:
            victims = self._admission.admit(request, now)
        except RequestError as error:
            counts = self._counts[request.ticket.tier.name]
            counts.refused[error.code] += 1
            counts.timed_out += error.code == "timeout"
            raise
        for victim in victims:
            self._counts[victim.tier.name].shed += 1
        return [
            self._fail(
                self._sequences[victim.seq_id], refusals.shed(self._admission.next_retry_ms(now))
            )
            for victim in victims
        ]

    def _take(
        self, worker: WorkerLedger, sequence: DispatchedSequence, output: StepOutput, now: float
    ) -> Delivery | None:
        token = output.token
        if token is not None and output.output_index != (known := sequence.num_output_tokens):
            if output.output_index > known:
                # One between was lost, which the link excludes: better an error than a wrong text.
                return self._fail_and_abort(sequence, refusals.internal("The output has a gap."))
            token = None
        if token is not None:
            sequence.token_ids.append(token.token_id)
            sequence.num_replays = 0
            if sequence.first_token_at is None:
                sequence.first_token_at = now
                ttft_s = now - sequence.arrival
                self._counts_of(sequence).note_first_token(sequence.ticket.tier, ttft_s)
            self._note_token(worker, sequence, output)
        reason = output.finish_reason
        if reason is FinishReason.ERROR:
            error = refusals.of_engine(output)
            self._drop_everywhere(sequence)
            return Delivery(
                sequence.seq_id, token, FinishReason.ERROR, output.num_cached_tokens, error
            )
        if reason is not None:
            self._admission.note_finished(sequence.num_output_tokens, now - sequence.handed_over)
            if sequence.first_token_at is not None and sequence.num_output_tokens > 1:
                tpot_s = (now - sequence.first_token_at) / (sequence.num_output_tokens - 1)
                self._counts_of(sequence).note_finished(sequence.ticket.tier, tpot_s)
            self._drop_everywhere(sequence)
        elif token is None:
            return None
        return Delivery(
            sequence.seq_id,
            token,
            reason,
            output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.embedding,
        )

    def _hand_over(self, worker: WorkerLedger, sequence: DispatchedSequence, now: float) -> None:
        ticket = sequence.ticket
        self._policy.take(ticket, now)
        self._admission.hand_over(ticket)
        if not ticket.is_prefill_charged:
            # At once, not when it was computed: else a tenant could take all slots meanwhile.
            ticket.is_prefill_charged = True
            self._policy.charge(ticket, prefill_tokens=sequence.num_prompt_tokens)
        sequence.worker_id = worker.worker_id
        sequence.preempted_from = None
        sequence.handed_over = now
        worker.take(sequence, self._fleet.is_suspect(sequence))

    def _enqueue(self, sequence: DispatchedSequence, now: float, is_new: bool = False) -> None:
        """Queue a sequence, new or again in its place."""
        self._admission.enqueue(sequence, is_new)
        self._policy.push(sequence.ticket, now)

    def _note_token(
        self, worker: WorkerLedger, sequence: DispatchedSequence, output: StepOutput
    ) -> None:
        """Charge a token that was just appended, and reserve its room."""
        if sequence.worker_id is None:  # preempted meanwhile
            self._admission.grow(sequence)
        else:
            worker.grow(sequence)
        cached = 0 if output.output_index else output.num_cached_tokens
        self._policy.charge(sequence.ticket, decode_tokens=1, cached_tokens=cached)

    def _preempt_for(self, sequence: DispatchedSequence, now: float) -> WorkerLedger | None:
        """Have the cheapest running sequences of lower tiers make room, if any can."""
        if not self._policy.preempts:
            return None
        chosen = self._preemptor.choose(sequence, self._sequences, now)
        if chosen is None:
            return None
        worker, victims = chosen
        for victim in victims:
            self._preempt(worker, victim, now)
            self._aborts.append(Abort(worker.worker_id, victim.seq_id))
        return worker

    def _preempt(self, worker: WorkerLedger, sequence: DispatchedSequence, now: float) -> None:
        """Take a sequence back into the queue. Its worker's last tokens are still taken."""
        worker.release(sequence.seq_id)
        sequence.worker_id = None
        self._admission.tenants.end_service(sequence.ticket)
        sequence.preempted_from = worker.worker_id
        sequence.ticket.boost += 1
        self._counts_of(sequence).preempted += 1
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
        if sequence.worker_id is None:
            self._admission.queue.leave(ticket)
            self._policy.remove(ticket)
        else:
            self._admission.tenants.end_service(ticket)
            worker = self._fleet.get(sequence.worker_id)
            assert worker is not None
            worker.release(sequence.seq_id)
        self._admission.tenants.leave(sequence)

    def _fail(self, sequence: DispatchedSequence, error: RequestError) -> Delivery:
        self._remove(sequence)
        return Delivery(sequence.seq_id, None, FinishReason.ERROR, error=error)

    def _fail_and_abort(self, sequence: DispatchedSequence, error: RequestError) -> Delivery:
        if sequence.worker_id is not None:
            self._aborts.append(Abort(sequence.worker_id, sequence.seq_id))
        return self._fail(sequence, error)

    def _counts_of(self, sequence: DispatchedSequence) -> TierCounts:
        return self._counts[sequence.ticket.tier.name]

    def _take_aborts(self) -> list[Command]:
        aborts, self._aborts = self._aborts, []
        return aborts
