"""The one thread between clients and workers: it owns the dispatcher, the worker and all text."""

import contextlib
import itertools
import logging
import select
import threading
import time
from collections.abc import Callable
from operator import attrgetter

from shoal.backend.chunk import Chunk
from shoal.backend.engine_config import ConfigError
from shoal.backend.failures import internal_error, no_worker, shutting_down
from shoal.backend.inbox import Inbox
from shoal.backend.intake import PreparedRequest
from shoal.backend.live_request import LiveChoice, LiveRequest
from shoal.backend.loop_status import LoopCounts, LoopStatus
from shoal.backend.messages import (
    AbortSequence,
    AddSequence,
    LoadProgress,
    StepResults,
    WorkerReady,
    WorkerStatus,
)
from shoal.backend.orders import Cancelled, Order, Prepared, RefusedElsewhere, Rejected, Submitted
from shoal.backend.request_class import RequestClass
from shoal.backend.text.output_processor import OutputProcessor
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.worker_keeper import (
    WorkerDown,
    WorkerEvent,
    WorkerKeeper,
    WorkerSaid,
    WorkerUp,
)
from shoal.scheduler.dispatched import Abort, Add, Command, Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.worker_ledger import WorkerCapacity

TICK_MS = 50
PUBLISH_S = 0.04  # between two reports of what changes with each step; an idle turn takes longer
# After so many workers in a row that never came up, waiting requests are told so.
MAX_FAILED_STARTS = 5
# No sign of life for so long: not ready, though it may yet recover.
STUCK_AFTER_S = 4.0

_SEQ_ID = attrgetter("seq_id")

Progress = Callable[[str, int, int], None]
Turn = Callable[[], contextlib.AbstractContextManager[None]]

log = logging.getLogger(__name__)


class DispatchLoop:
    """Runs in ``run``'s thread, which owns everything here except the inbox and ``status``."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        keeper: WorkerKeeper,
        tokenizer: Tokenizer,
        turn: Turn = contextlib.nullcontext,
    ) -> None:
        self._in_turn = turn
        self._dispatcher = dispatcher
        self._keeper = keeper
        self._tokenizer = tokenizer
        self._live: dict[int, LiveRequest] = {}  # by the seq_id of the first choice
        self._choices: dict[int, LiveChoice] = {}  # by seq_id, until their request ends
        self._inbox = Inbox()
        self._stop_at: float | None = None
        self._draining = False
        self._progress: Progress | None = None
        self._ready: WorkerReady | None = None
        self._was_refused = False
        self._counts = LoopCounts()
        self._published: tuple[object, ...] = ()
        self.status = LoopStatus()
        self.started = threading.Event()  # ready for the first time, or given up
        self.start_error: ConfigError | None = None

    def post(self, order: Order) -> None:
        """Hand an order to the loop; any thread, never blocks."""
        self._inbox.post(order)

    def drain(self, deadline: float) -> None:
        """Refuse new requests and end when none is live, at ``deadline`` (monotonic) at latest."""
        self._stop_at = deadline
        self._draining = True
        self._inbox.wake()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def was_refused(self) -> bool:
        """Whether the last worker that is gone said that it cannot start."""
        return self._was_refused

    @property
    def ready(self) -> WorkerReady | None:
        """What the latest worker said it can take."""
        return self._ready

    def run(self, progress: Progress) -> None:
        """Serve until drained. Ends early when the first worker cannot start (``start_error``)."""
        self._progress = progress
        try:
            while not self._is_over():
                try:
                    self._turn()
                except Exception:
                    # A bug in one turn must not silence all clients; the next turn goes on.
                    log.exception("a turn of the dispatch loop failed")
                    time.sleep(TICK_MS / 1000)
        finally:
            self._shut_down()

    def _is_over(self) -> bool:
        if self.start_error is not None:
            return True
        if self._stop_at is None:
            return False
        return not (self._live or self._inbox) or time.monotonic() >= self._stop_at

    def _shut_down(self) -> None:
        self._take_orders()
        for seq_id in list(self._live):
            self._fail(seq_id, shutting_down())
        self._inbox.close()
        self._keeper.close()
        self._publish(time.monotonic())
        self.started.set()

    def _turn(self) -> None:
        with self._in_turn():
            self._take_orders()
            now = time.monotonic()
            for event in self._keeper.poll(now):
                self._take_event(event, now)
            self._deliver(self._dispatcher.expire(now))
            self._send(self._dispatcher.poll(now))
        if now - self.status.turn_at >= PUBLISH_S or self._what_counts() != self._published:
            self._publish(now)
        self._wait()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._inbox.fd, select.POLLIN)
        link = self._keeper.link
        if link is not None:
            if not link.is_over:  # or its end would wake us for ever
                writes = select.POLLOUT if link.wants_to_write else 0
                poller.register(link.socket, select.POLLIN | writes)
            if link.exit_fd >= 0:
                poller.register(link.exit_fd, select.POLLIN)
        poller.poll(TICK_MS)

    def _take_orders(self) -> None:
        for order in self._inbox.take():
            try:
                self._take_order(order)
            except Exception:
                log.exception("a request could not be taken in")
                self._fail(order.seq_id, internal_error())

    def _take_order(self, order: Order) -> None:
        match order:
            case Submitted():
                self._live[order.seq_id] = LiveRequest(order.seq_id, order.sink, order.at)
            case Rejected():
                if order.tier is not None:
                    self._dispatcher.note_refused(
                        order.tier, order.error.code, order.was_full, time.monotonic()
                    )
                self._fail(order.seq_id, order.error)
            case RefusedElsewhere(tier=tier, count=count):
                self._dispatcher.note_full(tier, count)
            case Cancelled():
                self._cancel(order.seq_id)
            case Prepared():
                self._enqueue(order)

    def _enqueue(self, order: Prepared) -> None:
        live = self._live.get(order.seq_id)
        if live is None:
            return  # cancelled meanwhile
        request = order.request
        live.num_input_tokens = len(request.prompt_token_ids)
        if request.sampling.prompt_logprobs is not None:
            live.scored_token_ids = request.prompt_token_ids
            live.prompt_text = request.prompt_text
        try:
            self._refuse_without_worker()
            if self._draining:
                self._dispatcher.drain()
            for index, seq_id in enumerate((order.seq_id, *order.further_seq_ids)):
                self._add_choice(live, seq_id, index, request, order.request_class)
        except RequestError as error:
            self._fail(order.seq_id, error)
            return
        self._counts.prompt_tokens += live.num_input_tokens
        for choice in live.choices:
            self._emit(
                live,
                Chunk(
                    text=request.prompt_text if request.echo_input else "",
                    num_input_tokens=live.num_input_tokens,
                    index=choice.index,
                ),
            )

    def _add_choice(
        self,
        live: LiveRequest,
        seq_id: int,
        index: int,
        request: PreparedRequest,
        request_class: RequestClass,
    ) -> None:
        """Queue one choice of a request. Raises RequestError as the dispatcher does."""
        sampling = request.sampling.for_choice(index)
        shed = self._dispatcher.add(
            seq_id,
            request.prompt_token_ids,
            sampling,
            time.monotonic(),
            tenant=request_class.tenant,
            slo_class=request_class.tier.name,
            timeout_s=request_class.timeout_s,
            arrival=live.submitted_at,
            cache_salt=request_class.cache_salt,
            fork_of=live.seq_id if index else None,
            num_choices=0 if index else request.sampling.n,
            num_prompts=request_class.num_prompts,
            images=request.images,
        )
        choice = LiveChoice(
            live,
            seq_id,
            OutputProcessor(
                self._tokenizer,
                sampling,
                request.make_tool_parser(),
                request.make_reasoning_parser(),
            ),
            index if request.sampling.n > 1 else None,
            sampling.logprobs is not None,
            sampling.dimensions,
        )
        live.choices.append(choice)
        self._choices[seq_id] = choice
        self._deliver(shed)

    def _refuse_without_worker(self) -> None:
        if self._keeper.failed_starts >= MAX_FAILED_STARTS:
            raise no_worker()

    def _cancel(self, seq_id: int) -> None:
        if seq_id in self._live:
            self._finish(seq_id, Chunk(finish_reason=FinishReason.CANCELLED))

    def _drop(self, seq_id: int) -> None:
        """Let dispatcher and worker forget a sequence."""
        self._send(self._dispatcher.abort(seq_id))

    def _send(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Add(sequence=sequence):
                    self._keeper.send(
                        AddSequence(
                            sequence.seq_id,
                            list(sequence.token_ids),
                            sequence.num_prompt_tokens,
                            sequence.sampling,
                            sequence.cache_salt,
                            sequence.urgency,
                            sequence.tpot_s,
                            sequence.fork_of,
                            sequence.images,
                        )
                    )
                case Abort(seq_id=seq_id):
                    self._keeper.send(AbortSequence(seq_id))

    def _take_event(self, event: WorkerEvent, now: float) -> None:
        match event:
            case WorkerUp():
                self._worker_up(event)
            case WorkerDown():
                self._worker_down(event, now)
            case WorkerSaid(message=LoadProgress() as message):
                if self._progress is not None and not self.started.is_set():
                    self._progress(message.phase, message.done, message.total)
            case WorkerSaid(message=StepResults() as message):
                self._counts.step_at = now
                deliveries = self._dispatcher.outputs(event.worker_id, message.outputs, now)
                self._take_status(event.worker_id, message.status)
                self._deliver(deliveries)
            case WorkerSaid(message=WorkerStatus() as message):
                self._take_status(event.worker_id, message)

    def _worker_up(self, event: WorkerUp) -> None:
        ready = event.ready
        self._ready = ready
        self._counts.parity = ready.parity or self._counts.parity
        log.info(
            "worker %d is ready: %s on %s, %d KV blocks of %d tokens, context of %d tokens",
            event.worker_id,
            ready.dtype,
            ready.device,
            ready.num_blocks,
            ready.block_size,
            ready.max_model_len,
        )
        capacity = WorkerCapacity(
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            max_num_seqs=ready.max_num_seqs,
            max_model_len=ready.max_model_len,
            max_num_batched_tokens=ready.max_num_batched_tokens,
        )
        self._deliver(self._dispatcher.worker_ready(event.worker_id, capacity))
        self._publish(time.monotonic())
        self.started.set()

    def _worker_down(self, event: WorkerDown, now: float) -> None:
        log.error("worker %d is gone: %s", event.worker_id, event.reason)
        self._was_refused = event.refused
        if self._ready is None:
            prefix = "" if event.refused else "the worker ended while loading: "
            self.start_error = ConfigError(prefix + event.reason)
            return
        self._counts.note_worker_gone()
        if event.was_ready:
            self._deliver(self._dispatcher.worker_dead(event.worker_id, now))
        if self._keeper.failed_starts >= MAX_FAILED_STARTS:
            for seq_id in list(self._live):
                self._fail(seq_id, no_worker())

    def _take_status(self, worker_id: int, status: WorkerStatus) -> None:
        self._counts.take(status)
        self._dispatcher.worker_status(
            worker_id, status.free_blocks, status.num_running, status.num_waiting, status.step
        )

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for seq_id, news in itertools.groupby(deliveries, _SEQ_ID):
            try:
                self._deliver_together(seq_id, list(news))
            except Exception:
                log.exception("the output of one request could not be processed")
                choice = self._choices.get(seq_id)
                if choice is not None:
                    self._fail(choice.request.seq_id, internal_error())

    def _deliver_together(self, seq_id: int, deliveries: list[Delivery]) -> None:
        """News of one sequence that came side by side."""
        choice = self._choices.get(seq_id)
        if choice is None:
            return
        if not choice.index:  # the others read what it computed
            cached = max(delivery.num_cached_tokens for delivery in deliveries)
            choice.request.cached_tokens = max(choice.request.cached_tokens, cached)
        chunk = choice.plain_chunk(deliveries)
        if chunk is not None:
            self._counts.generation_tokens += len(deliveries)
            self._emit(choice.request, chunk)
            return
        for delivery in deliveries:
            if seq_id in self._choices:
                self._deliver_one(choice, delivery)

    def _deliver_one(self, choice: LiveChoice, delivery: Delivery) -> None:
        live = choice.request
        if delivery.finish_reason is FinishReason.ERROR:
            error = delivery.error or internal_error()
            level = logging.ERROR if error.status >= 500 else logging.INFO
            log.log(level, "request %d failed: %s", live.seq_id, error)
            self._fail(live.seq_id, error)
            return
        delta = choice.processor.push(delivery.token, delivery.finish_reason)
        if delta.stop_hit and delivery.finish_reason is None:
            self._drop(delivery.seq_id)
        chunk = choice.chunk(delivery, delta, self._tokenizer)
        self._counts.generation_tokens += chunk.num_new_tokens
        if chunk.final:
            self._finish(live.seq_id, chunk)
        else:
            self._emit(live, chunk)

    def _fail(self, seq_id: int, error: RequestError) -> None:
        live = self._live.get(seq_id)
        if live is not None:
            self._finish(seq_id, Chunk.of_error(error, live.num_input_tokens))

    def _finish(self, seq_id: int, chunk: Chunk) -> None:
        """The one place where a request ends: its last chunk, once, and none of its sequences."""
        live = self._live.pop(seq_id)
        for choice in live.choices:
            del self._choices[choice.seq_id]
            self._drop(choice.seq_id)
        assert chunk.finish_reason is not None
        self._counts.finished[chunk.finish_reason.value] += 1
        self._emit(live, chunk)

    def _emit(self, live: LiveRequest, chunk: Chunk) -> None:
        try:
            live.sink(chunk)
        except Exception:
            log.exception("a chunk could not be handed on")

    def _what_counts(self) -> tuple[object, ...]:
        """What must be told to other threads at once: how full it is, and whether it serves."""
        return self._dispatcher.num_queued, len(self._live), self._keeper.state, self._was_refused

    def _publish(self, now: float) -> None:
        self._published = self._what_counts()
        self.status = self._counts.status(
            now, self._keeper, self._dispatcher, self._ready, len(self._live)
        )
