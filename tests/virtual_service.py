"""A dispatcher and one worker in virtual time: a step costs what its tokens cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from builders import fake_token, make_sampling, make_scheduler

from shoal.scheduler.dispatched import Abort, Command, Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sequence import FinishReason, Sequence
from shoal.scheduler.step_pace import StepPace
from shoal.scheduler.worker_ledger import WorkerCapacity

# A step reads all weights whatever it computes, so its base outweighs its tokens.
STEP_BASE_S = 0.020
STEP_PER_TOKEN_S = 0.00005


def step_seconds(num_tokens: int) -> float:
    return STEP_BASE_S + STEP_PER_TOKEN_S * num_tokens


@dataclass
class Request:
    """One client's request and what became of it. Times are virtual seconds."""

    at: float
    num_prompt: int
    num_outputs: int
    tenant: str = "default"
    slo_class: str | None = None
    timeout_s: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    error: RequestError | None = None

    @property
    def ttft(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.at


class VirtualService:
    """Runs requests to the end of ``until``. The worker is a real scheduler without a model."""

    def __init__(
        self, dispatcher: Dispatcher, *, max_num_seqs: int = 8, num_blocks: int = 400
    ) -> None:
        self.dispatcher = dispatcher
        self.now = 0.0
        self.scheduler = make_scheduler(
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=256
        )
        self.scheduler.pace = StepPace.measured(lambda a, b, _: step_seconds(a + b))
        config = self.scheduler.config
        capacity = WorkerCapacity(
            num_blocks,
            16,
            max_num_seqs,
            config.max_model_len,
            config.max_num_batched_tokens,
        )
        dispatcher.worker_ready(1, capacity)
        self.requests: list[Request] = []
        self.done: list[Request] = []
        self._arrivals: list[tuple[float, int]] = []
        self.on_end: Callable[[Request], Request | None] = lambda request: None

    def ask(self, request: Request) -> None:
        heappush(self._arrivals, (request.at, len(self.requests)))
        self.requests.append(request)

    def run(self, until: float, each_step: Callable[[], None] = lambda: None) -> None:
        """Turn after turn: arrivals, hand-over, a step, its outputs."""
        while self.now < until:
            self._take_arrivals()
            self._deliver(self.dispatcher.expire(self.now))
            self._send(self.dispatcher.poll(self.now))
            if self.scheduler.has_unfinished:
                self._step()
            elif self._arrivals:
                self.now = max(self.now, min(until, self._arrivals[0][0]))
            else:
                return
            each_step()

    def served(self, **fields: str) -> Iterator[Request]:
        """Requests with a first token whose fields are these."""
        for request in self.requests:
            if request.first_token_at is not None and all(
                getattr(request, name) == value for name, value in fields.items()
            ):
                yield request

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, seq_id = heappop(self._arrivals)
            request = self.requests[seq_id]
            try:
                shed = self.dispatcher.add(
                    seq_id,
                    [7] * request.num_prompt,
                    make_sampling(max_tokens=request.num_outputs),
                    self.now,
                    tenant=request.tenant,
                    slo_class=request.slo_class,
                    timeout_s=request.timeout_s,
                )
            except RequestError as error:
                self._end(request, error)
                continue
            self._deliver(shed)

    def _send(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Abort):
                self.scheduler.abort(command.seq_id)
                continue
            sent = command.sequence
            self.scheduler.add(
                Sequence(
                    sent.seq_id,
                    list(sent.token_ids),
                    sent.num_prompt_tokens,
                    sent.sampling,
                    urgency=sent.urgency,
                    tpot_s=sent.tpot_s,
                )
            )

    def _step(self) -> None:
        output = self.scheduler.schedule()
        seconds = step_seconds(output.num_tokens)
        self.scheduler.note_duration(output, seconds)
        self.now += seconds
        sampled = {
            item.sequence.seq_id: fake_token(item.sequence.seq_id, item.sequence.num_output_tokens)
            for item in output.scheduled
            if item.samples
        }
        results = self.scheduler.update_from_output(output, sampled)
        self._deliver(self.dispatcher.outputs(1, results, self.now))
        scheduler = self.scheduler
        self.dispatcher.worker_status(
            1, scheduler.free_blocks, scheduler.num_running, scheduler.num_waiting, 0
        )

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            request = self.requests[delivery.seq_id]
            if delivery.token is not None:
                request.token_times.append(self.now)
                if request.first_token_at is None:
                    request.first_token_at = self.now
            if delivery.finish_reason is not None:
                assert (delivery.finish_reason is FinishReason.ERROR) == bool(delivery.error)
                self._end(request, delivery.error)

    def _end(self, request: Request, error: RequestError | None) -> None:
        assert request.ended_at is None, "ended twice"
        request.ended_at = self.now
        request.error = error
        self.done.append(request)
        follower = self.on_end(request)
        if follower is not None:
            self.ask(follower)


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of them do not exceed."""
    assert values
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
