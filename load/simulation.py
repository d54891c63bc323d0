"""Clients, the real dispatcher and its workers, wired together in virtual time."""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from typing import Any

from shoal.load.records import Outcome, RequestRecord, SimulationResult, TimelineSample
from shoal.load.service_meter import PauseMeter, ServiceMeter
from shoal.load.simulated_worker import SimulatedWorker, WorkerReport
from shoal.load.step_cost import StepCost, StepShape
from shoal.load.virtual_time import EventLoop
from shoal.load.workload import Lengths, Request, Workload, chain, segment_tokens
from shoal.scheduler.block_pool import BlockPool
from shoal.scheduler.dispatched import Add, Command, Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.errors import RequestError
from shoal.scheduler.eviction import make_eviction_policy
from shoal.scheduler.kv_manager import KVCacheManager
from shoal.scheduler.prefix_tree import PrefixTree
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.scheduler import Scheduler, SchedulerConfig
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.tiers import TenantTable, TierTable
from shoal.scheduler.worker_ledger import WorkerCapacity

TICK_S = 0.050  # the dispatch loop's longest wait
SAMPLE_S = 1.0  # between two samples of the timeline


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The defaults are those of the default model in fp32 with 1 GiB of KV cache."""

    num_blocks: int = 1456
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    prefix_eviction: str = "none"  # none: no prefix cache; else lru, lfu or reuse

    def make_scheduler(self, clock: Callable[[], float] | None = None) -> Scheduler:
        """A new scheduler over a new pool. ``clock`` is what its prefix cache learns by."""
        config = SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len)
        tree = None
        if self.prefix_eviction != "none":
            policy = make_eviction_policy(self.prefix_eviction, self.num_blocks)
            tree = PrefixTree(self.block_size, policy, clock)
        pool = BlockPool(self.num_blocks, self.block_size)
        return Scheduler(config, KVCacheManager(pool, tree))

    @property
    def capacity(self) -> WorkerCapacity:
        return WorkerCapacity(
            self.num_blocks,
            self.block_size,
            self.max_num_seqs,
            self.max_model_len,
            self.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class Latencies:
    """Constant delays, in seconds, of what lies between the parts that are simulated."""

    intake: float = 0.002  # client to dispatcher: HTTP, gRPC, chat template, tokenising
    to_worker: float = 0.0003
    from_worker: float = 0.0003
    to_client: float = 0.001  # dispatcher to client: detokenising, Triton's response, SSE


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """``max_retries``: how often a refused client comes back after its Retry-After."""

    cost: StepCost
    worker: WorkerSettings = WorkerSettings()
    num_workers: int = 1
    latencies: Latencies = Latencies()
    max_queued_requests: int = 1024
    max_retries: int = 0
    policy: str = "fcfs"


@dataclass(slots=True, eq=False)
class _Live:
    """A request from its first arrival to its end."""

    request: Request
    record: RequestRecord
    tokens: tuple[int, ...]  # of the answer
    num_retries_left: int = 0


class Simulation:
    """One run. The dispatcher, schedulers and KV managers are the real ones.

    ``make_dispatcher`` and ``make_scheduler`` replace the defaults, to try a variant.
    """

    def __init__(
        self,
        workload: Workload,
        config: SimulationConfig,
        *,
        make_dispatcher: Callable[[], Dispatcher] | None = None,
        make_scheduler: Callable[[], Scheduler] | None = None,
    ) -> None:
        self.loop = EventLoop()
        self.dispatcher = (make_dispatcher or partial(default_dispatcher, config, workload))()
        self._workload = workload
        self._config = config
        self._latencies = config.latencies
        self._calls = _DispatcherCalls(self.dispatcher)
        self._arrivals = iter(workload.requests)
        self._num_left = workload.num_requests
        self._live: dict[int, _Live] = {}
        self._records: list[RequestRecord] = []
        self._refused_line: deque[RequestRecord] = deque()
        self._pauses = PauseMeter(max((r.arrival for r in workload.requests), default=0.0))
        self._service = ServiceMeter({request.tenant for request in workload.requests})
        self._timeline: list[TimelineSample] = []
        self._is_ticking = False
        self._workers = {
            worker_id: SimulatedWorker(
                worker_id,
                make_scheduler()
                if make_scheduler
                else config.worker.make_scheduler(lambda: self.loop.now),
                config.cost,
                self.loop,
                self._send_report,
                self._token,
            )
            for worker_id in range(1, config.num_workers + 1)
        }

    @property
    def workers(self) -> tuple[SimulatedWorker, ...]:
        return tuple(self._workers.values())

    def run(self) -> SimulationResult:
        """Simulate until every request has ended."""
        for worker in self._workers.values():
            self.dispatcher.worker_ready(worker.worker_id, self._config.worker.capacity)
            worker.start()
        if self._num_left:
            self._await_next_arrival()
            self._sample()
            self.loop.run()
        assert self._num_left == 0, f"{self._num_left} requests never ended"
        assert self.dispatcher.num_live == 0
        return SimulationResult(
            workload=self._workload,
            records=self._records,
            timeline=self._timeline,
            contended_service=self._service.contended,
            contended_s=self._service.contended_s,
            duration_s=self.loop.now,
            busy_s=[worker.busy_s for worker in self.workers],
            num_steps=sum(worker.num_steps for worker in self.workers),
            num_scheduled=sum(worker.num_scheduled for worker in self.workers),
            num_preemptions=sum(worker.scheduler.num_preemptions for worker in self.workers),
            num_events=self.loop.num_events,
            longest_pauses=self._pauses.longest,
        )

    def _await_next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self.loop.at(max(self.loop.now, request.arrival), self._arrive_in_order, request)

    def _arrive_in_order(self, request: Request) -> None:
        self._await_next_arrival()
        self._arrive(request)

    def _arrive(self, request: Request) -> None:
        """A client sends a request; it reaches the dispatcher when intake is done with it."""
        seq_id = len(self._records)
        record = RequestRecord(
            seq_id,
            request.tenant,
            request.slo_class,
            self.loop.now,
            request.num_prompt_tokens,
            request.num_output_tokens,
        )
        self._records.append(record)
        self._live[seq_id] = _Live(
            request, record, segment_tokens(request.answer), self._config.max_retries
        )
        self.loop.after(self._latencies.intake, self._submit, seq_id)
        if request.patience_s is not None:
            self.loop.after(request.patience_s, self._lose_patience, seq_id)

    def _submit(self, seq_id: int) -> None:
        live = self._live.get(seq_id)
        if live is None:
            return  # gave up before intake was done, or between two tries
        try:
            deliveries = self._calls.add(seq_id, live.request, self.loop.now)
        except RequestError as error:
            self._refuse(live, error)
            return
        live.record.accepted = self.loop.now
        self._pauses.arrives(live.record.slo_class, self.loop.now)
        self._service.waits(live.request.tenant, self.loop.now)
        for delivery in deliveries:  # those that had to make way
            self._deliver(delivery)
        self._poll()
        self._start_ticking()

    def _refuse(self, live: _Live, error: RequestError) -> None:
        record = live.record
        record.num_refusals += 1
        if record.refused is None:
            record.refused = self.loop.now
            record.refusal_code = error.code
            if error.retry_after_ms is not None:
                record.retry_after_s = error.retry_after_ms / 1000
                self._refused_line.append(record)
        if error.retry_after_ms is not None and live.num_retries_left > 0:
            live.num_retries_left -= 1
            self.loop.after(error.retry_after_ms / 1000, self._submit, record.seq_id)
            return
        self._end(live, Outcome.REFUSED)

    def _lose_patience(self, seq_id: int) -> None:
        live = self._live.get(seq_id)
        if live is None or live.record.first_token is not None:
            return
        self._send(self.dispatcher.abort(seq_id))
        if live.record.accepted is not None and live.record.handed_over is None:
            self._leave_queue(live)
        self._end(live, Outcome.CANCELLED)
        self._poll()

    def _poll(self) -> None:
        for delivery in self._calls.expire(self.loop.now):
            self._deliver(delivery)
        self._send(self.dispatcher.poll(self.loop.now))

    def _send(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Add):
                live = self._live[command.sequence.seq_id]
                if live.record.handed_over is None:
                    live.record.handed_over = self.loop.now
                    self._leave_queue(live)
            worker = self._workers[command.worker_id]
            message = worker.message_of(command)
            self.loop.after(self._latencies.to_worker, worker.receive, message)

    def _leave_queue(self, live: _Live) -> None:
        """A place in the queue is free: the first of those refused would have got it."""
        self._service.stops_waiting(live.request.tenant, self.loop.now)
        if self._refused_line:
            self._refused_line.popleft().would_be_accepted = self.loop.now

    def _send_report(self, report: WorkerReport) -> None:
        self.loop.after(self._latencies.from_worker, self._take_report, report)

    def _take_report(self, report: WorkerReport) -> None:
        now = self.loop.now
        deliveries = self.dispatcher.outputs(report.worker_id, report.outputs, now)
        self.dispatcher.worker_status(
            report.worker_id,
            report.free_blocks,
            report.num_running,
            report.num_waiting,
            report.step,
        )
        for delivery in deliveries:
            self._deliver(delivery)
        self._poll()

    def _deliver(self, delivery: Delivery) -> None:
        live = self._live.get(delivery.seq_id)
        if live is None:
            return
        record = live.record
        seen = self.loop.now + self._latencies.to_client
        record.num_cached_tokens = max(record.num_cached_tokens, delivery.num_cached_tokens)
        if delivery.token is not None:
            if record.first_token is None:
                record.first_token = seen
                num_computed = record.num_prompt_tokens - record.num_cached_tokens
                self._service.prefilled(record.tenant, num_computed)
            record.num_delivered += 1
            self._pauses.token(record.slo_class, seen)
            self._service.decoded(record.tenant)
        if delivery.finish_reason is FinishReason.ERROR:
            self._fail(live, delivery.error)
        elif delivery.finish_reason is not None:
            self._end(live, Outcome.FINISHED)

    def _fail(self, live: _Live, error: RequestError | None) -> None:
        """An error after it was accepted. One that says when to retry is a late refusal."""
        if live.record.handed_over is None:
            self._service.stops_waiting(live.request.tenant, self.loop.now)
            if error is not None and error.retry_after_ms is not None:
                live.record.accepted = None
                self._refuse(live, error)
                return
        if error is not None:
            live.record.refusal_code = error.code
        self._end(live, Outcome.FAILED)

    def _end(self, live: _Live, outcome: Outcome) -> None:
        """The one way out of a request; the next turn of its chat follows, or is called off."""
        record = live.record
        assert record.outcome is None, f"request {record.seq_id} ended twice"
        record.outcome = outcome
        record.ended = self.loop.now + self._latencies.to_client
        del self._live[record.seq_id]
        self._num_left -= 1
        following = live.request.follow_up
        if following is not None:
            if outcome is Outcome.FINISHED:
                self.loop.at(record.ended + following.arrival, self._arrive, following)
            else:
                self._call_off(following)
        if self._num_left == 0:
            self.loop.stop()

    def _call_off(self, following: Request) -> None:
        """Record the rest of a chat whose turn got no answer: it is never sent."""
        for request in chain(following):
            record = RequestRecord(
                len(self._records),
                request.tenant,
                request.slo_class,
                self.loop.now,
                request.num_prompt_tokens,
                request.num_output_tokens,
                outcome=Outcome.NOT_SENT,
                ended=self.loop.now,
            )
            self._records.append(record)
            self._num_left -= 1

    def _start_ticking(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self.loop.after(TICK_S, self._tick)

    def _tick(self) -> None:
        """Poll as the dispatch loop does when nothing happens, while something is queued."""
        self._is_ticking = self.dispatcher.num_queued > 0
        if self._is_ticking:
            self._poll()
            self.loop.after(TICK_S, self._tick)

    def _sample(self) -> None:
        schedulers = [worker.scheduler for worker in self.workers]
        total = self._config.worker.num_blocks * len(schedulers)
        self._timeline.append(
            TimelineSample(
                time=self.loop.now,
                num_queued=self.dispatcher.num_queued,
                num_running=sum(scheduler.num_running for scheduler in schedulers),
                num_waiting=sum(scheduler.num_waiting for scheduler in schedulers),
                kv_usage=1 - sum(scheduler.free_blocks for scheduler in schedulers) / total,
            )
        )
        self.loop.after(SAMPLE_S, self._sample)

    def _token(self, seq_id: int, output_index: int) -> int:
        live = self._live.get(seq_id)
        # A sequence that was cancelled runs on until the worker hears of it.
        return live.tokens[output_index] if live is not None else 0


class _DispatcherCalls:
    """Calls a dispatcher with tenants, tiers and timeouts only where it knows them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._add: Callable[..., Any] = dispatcher.add
        self._expire: Callable[[float], Iterable[Delivery]] | None
        self._expire = getattr(dispatcher, "expire", None)
        parameters = inspect.signature(dispatcher.add).parameters
        names = ("tenant", "slo_class", "timeout_s")
        self._names = tuple(name for name in names if name in parameters)

    def add(self, seq_id: int, request: Request, now: float) -> Iterable[Delivery]:
        """Raises RequestError where the dispatcher does; returns what it returns."""
        extra = {name: getattr(request, name) for name in self._names}
        sampling = _sampling(request.num_output_tokens)
        return self._add(seq_id, request.prompt_tokens(), sampling, now, **extra) or ()

    def expire(self, now: float) -> Iterable[Delivery]:
        """The ends of those whose time is over."""
        return self._expire(now) if self._expire is not None else ()


def default_dispatcher(config: SimulationConfig, workload: Workload) -> Dispatcher:
    """A dispatcher with the policy, tiers and weights. Raises ValueError on an unknown policy."""
    known = {item.name for item in fields(DispatcherConfig)}
    settings: dict[str, Any] = {"max_queued_requests": config.max_queued_requests}
    if "policy" in known:
        settings["policy"] = config.policy
    elif config.policy != "fcfs":
        raise ValueError(f"policy {config.policy!r} is not known; this dispatcher has fcfs only.")
    if {"tiers", "tenants"} <= known:
        tiers = {name: asdict(tier) for name, tier in workload.tiers.items()}
        weights = {name: {"weight": weight} for name, weight in workload.tenant_weights.items()}
        settings["tiers"] = TierTable.from_dict(tiers)
        settings["tenants"] = TenantTable.from_dict(weights)
    return Dispatcher(DispatcherConfig(**settings))


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0)


def saturation_rate(config: SimulationConfig, lengths: Sequence[Lengths]) -> float:
    """Requests per second that the workers finish when always full: an estimate for scaling load.

    In the steady state a step holds ``n`` decodes and the prefill of ``n / mean_output`` prompts;
    slots, KV blocks and the token budget each bound ``n``.
    """
    worker, cost = config.worker, config.cost
    mean_prompt = sum(item.prompt for item in lengths) / len(lengths)
    mean_output = sum(item.output for item in lengths) / len(lengths)
    mean_pairs = sum(item.prompt**2 for item in lengths) / len(lengths) / 2
    # Each chunk of a prompt reads what came before it.
    mean_reads = mean_prompt + mean_pairs / worker.max_num_batched_tokens
    num_seqs = min(
        worker.max_num_seqs,
        worker.num_blocks * worker.block_size / (mean_prompt + mean_output),
        worker.max_num_batched_tokens / (1 + mean_prompt / mean_output),
    )
    prompts_per_step = num_seqs / mean_output
    shape = StepShape(
        prefill_tokens=round(prompts_per_step * mean_prompt),
        decode_seqs=round(num_seqs),
        context_tokens=round(
            num_seqs * (mean_prompt + mean_output / 2) + prompts_per_step * mean_reads
        ),
        prefill_pairs=round(prompts_per_step * mean_pairs),
    )
    return config.num_workers * prompts_per_step / cost.seconds(shape)
