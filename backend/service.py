"""The service behind one loaded model version: takes requests, gives chunks, knows no Triton."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.backend.chunk import Chunk
from shoal.backend.dispatch_loop import (
    STUCK_AFTER_S,
    DispatchLoop,
    Progress,
    Turn,
)
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.failures import internal_error, shutting_down
from shoal.backend.grammar_compiler import GrammarCompiler
from shoal.backend.image_prompt import ImagePrompter
from shoal.backend.intake import Intake, PreparedRequest, RawRequest
from shoal.backend.metrics import ServiceCounts
from shoal.backend.orders import Cancelled, Prepared, RefusedElsewhere, Rejected, Submitted
from shoal.backend.request_class import RequestClass, classify
from shoal.backend.text.chat_template import ChatTemplate
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text_ops import TextRequest
from shoal.backend.weights.catalogue import resolve_weights
from shoal.backend.worker_keeper import WorkerKeeper, WorkerLink, WorkerState
from shoal.backend.worker_process import WorkerProcess
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.drain import DrainEstimate
from shoal.scheduler.errors import RequestError
from shoal.scheduler.preemption import PreemptionConfig
from shoal.scheduler.sampling_params import MAX_CHOICES

# Tokenising releases the GIL; two threads keep one long prompt from holding up all others.
NUM_INTAKE_THREADS = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextParts:
    """What the text side needs of a checkpoint."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_text_parts(path: Path) -> TextParts:
    """Read tokeniser and chat template. Raises ConfigError."""
    tokenizer = Tokenizer.from_checkpoint(path)
    return TextParts(tokenizer, ChatTemplate.from_tokenizer(tokenizer))


class TextAnswer(Protocol):
    """Where the answer to a text request goes: one call of either."""

    def send(self, answer: dict[str, Any]) -> None: ...

    def refuse(self, error: RequestError) -> None: ...


class Service:
    """One served model version. ``start`` once, then ``submit`` and ``cancel`` from any thread.

    Every submitted request gets exactly one final chunk. ``spawn`` and ``text`` are for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_name: str,
        version: str,
        *,
        spawn: Callable[[], WorkerLink] | None = None,
        text: TextParts | None = None,
    ) -> None:
        self._config = config
        self._model_name = model_name
        self._version = version
        self._spawn = spawn or self._spawn_worker
        self._text = text
        self._seq_ids = itertools.count(1)
        self._pool = ThreadPoolExecutor(NUM_INTAKE_THREADS, thread_name_prefix="shoal-intake")
        self._lock = threading.Lock()
        self._num_in_intake = 0
        self._tiers = config.tier_table()
        self._tenants = config.tenant_table()
        self._highest_weight = max(self._tiers.get(name).weight for name in self._tiers.names)
        self._estimate = DrainEstimate()  # the one that the last refusal came from
        self._num_refused_since = 0
        self._loop: DispatchLoop | None = None
        self._intake: Intake | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        progress: Progress = lambda phase, done, total: None,
        turn: Turn = contextlib.nullcontext,
    ) -> None:
        """Load the text side and a first worker; blocks until it is ready. Raises ConfigError.

        The loop's turns, each of which may bring chunks to many sinks, run inside ``turn()``.
        """
        text = self._text or load_text_parts(resolve_weights(self._config.weights))
        loop = DispatchLoop(
            Dispatcher(_dispatcher_config(self._config)),
            WorkerKeeper(
                self._spawn,
                self._config.worker_start_timeout_s,
                self._config.worker_stall_timeout_s,
            ),
            text.tokenizer,
            turn,
        )
        self._thread = threading.Thread(
            target=loop.run, args=(progress,), name="shoal-dispatch", daemon=True
        )
        self._thread.start()
        self._loop = loop
        loop.started.wait()
        if loop.start_error is not None:
            raise loop.start_error
        if loop.ready is None:
            raise ConfigError("the service was stopped while it was starting.")
        form = loop.ready.images
        self._intake = Intake(
            text.tokenizer,
            text.template,
            loop.ready.max_model_len,
            loop.ready.vocab_size,
            self._config.default_sampling,
            GrammarCompiler(
                lambda: text.tokenizer, loop.ready.vocab_size, loop.ready.eos_token_ids
            ),
            max_choices=min(MAX_CHOICES, self._config.max_queued_requests),
            images=ImagePrompter(form, text.tokenizer) if form is not None else None,
            hidden_size=loop.ready.hidden_size,
        )

    def submit(self, raw: RawRequest, sink: Callable[[Chunk], None], waited_s: float = 0.0) -> int:
        """Take a request; its chunks come to ``sink``, from the dispatch thread. Returns its id.

        ``waited_s``: how long it waited elsewhere before; its timeout counts from then.
        """
        loop = self._running_loop()
        seq_id = next(self._seq_ids)
        loop.post(Submitted(seq_id, sink, time.monotonic() - waited_s))
        try:
            request_class = classify(raw, self._tiers, self._config.max_request_seconds)
        except RequestError as error:
            loop.post(Rejected(seq_id, error))
            return seq_id
        try:
            self._check_queue(request_class)
            self._enter_intake()
        except RequestError as error:
            was_full = error.code == "queue_full"
            loop.post(Rejected(seq_id, error, request_class.tier, was_full))
            return seq_id
        try:
            self._pool.submit(self._prepare, seq_id, raw, request_class)
        except RuntimeError:  # the pool is closed
            self._leave_intake()
            loop.post(Rejected(seq_id, shutting_down()))
        return seq_id

    def answer_text(self, request: TextRequest, raw: RawRequest, answer: TextAnswer) -> None:
        """Answer what needs no model, once, from an intake thread; a refusal is an answer too."""
        try:
            self._enter_intake()
        except RequestError as error:
            answer.refuse(error)
            return
        try:
            self._pool.submit(self._answer_text, request, raw, answer)
        except RuntimeError:  # the pool is closed
            self._leave_intake()
            answer.refuse(shutting_down())

    def _answer_text(self, request: TextRequest, raw: RawRequest, answer: TextAnswer) -> None:
        try:
            assert self._intake is not None, "not started"
            answer.send(request.answer(self._intake, raw))
        except RequestError as error:
            answer.refuse(error)
        except Exception:
            log.exception("a text request could not be answered")
            answer.refuse(internal_error())
        finally:
            self._leave_intake()

    def cancel(self, seq_id: int) -> None:
        """End a request in whatever phase; its final chunk says cancelled. Unknown ids pass."""
        self._running_loop().post(Cancelled(seq_id))

    def note_refused(self, by_tier: Mapping[str, int]) -> None:
        """Count what the shim refused at its door; of a tier that nobody knows as the default's."""
        for name, count in by_tier.items():
            known = name if name in self._tiers.names else None
            self._running_loop().post(RefusedElsewhere(self._tiers.get(known), count))

    def status(self) -> dict[str, Any]:
        """The heartbeat's payload."""
        loop = self._running_loop()
        status, now = loop.status, time.monotonic()
        return {
            "state": self._state(now),
            "model": self._model_name,
            "version": self._version,
            "step": status.step,
            "step_age_ms": int(1000 * (now - status.step_at)) if status.step_at else None,
            "free_blocks": status.free_blocks,
            "total_blocks": status.total_blocks,
            "num_running": status.num_running,
            "num_waiting": status.num_waiting,
            "num_queued": status.num_queued,
            "num_live": status.num_live,
            "queue": status.drain.at_the_door(self._highest_weight),
            "num_preemptions": status.num_preemptions,
            **msgspec.to_builtins(status.memory),
            **msgspec.to_builtins(status.cache),
            "tiers": msgspec.to_builtins(status.tiers),
            "worker_restarts": status.worker_restarts,
            "max_model_len": status.max_model_len,
            "max_num_seqs": status.max_num_seqs,
            "self_test": msgspec.to_builtins(status.parity) if status.parity else None,
            "time": time.time(),
        }

    def counts(self) -> ServiceCounts:
        """What the metrics say."""
        status = self._running_loop().status
        return ServiceCounts(
            kv_blocks_free=status.free_blocks,
            kv_blocks_total=status.total_blocks,
            sequences_running=status.num_running,
            requests_queued=status.num_queued,
            engine_steps=status.step,
            worker_restarts=status.worker_restarts,
            memory=status.memory,
            prompt_tokens=status.prompt_tokens,
            generation_tokens=status.generation_tokens,
            preemptions=status.num_preemptions,
            cache=status.cache,
            requests=status.finished,
            parity_ok=None if status.parity is None else status.parity.ok,
            tiers=status.tiers,
        )

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, let open ones finish for ``drain_s``, fail the rest. Idempotent."""
        if self._loop is not None and self._thread is not None:
            self._loop.drain(time.monotonic() + drain_s)
            self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _spawn_worker(self) -> WorkerProcess:
        """The first one tests itself, if that is asked for; who replaces it must be quick, and must
        not fail for a cache: after one that refused to start, the next goes without a disk."""
        loop = self._loop
        if loop is None or loop.ready is None:
            return WorkerProcess(self._config)
        config = replace(self._config, self_test=0)
        if loop.was_refused and config.kv_disk_dir is not None:
            log.warning("the next worker is started without kv_disk_dir")
            config = replace(config, kv_disk_dir=None)
        return WorkerProcess(config)

    def _running_loop(self) -> DispatchLoop:
        assert self._loop is not None, "not started"
        return self._loop

    def _state(self, now: float) -> str:
        loop = self._running_loop()
        status = loop.status
        if loop.draining:
            return "draining"
        if now - status.turn_at > STUCK_AFTER_S:
            return "stuck"
        if status.worker_state is not WorkerState.READY:
            return "restarting" if status.max_model_len else "loading"
        return "stuck" if now - status.heard_at > STUCK_AFTER_S else "ready"

    def _check_queue(self, request_class: RequestClass) -> None:
        """Refuse, before any work on the prompt, what the queue will not serve in time."""
        estimate = self._running_loop().status.drain
        with self._lock:
            if estimate is not self._estimate:
                self._estimate, self._num_refused_since = estimate, 0
            num_ahead = estimate.num_refused + self._num_refused_since + 1
            try:
                estimate.check(
                    request_class.tenant,
                    request_class.tier,
                    request_class.timeout_s,
                    num_ahead,
                    self._tenants.get(request_class.tenant).weight,
                )
            except RequestError:
                self._num_refused_since += 1
                raise

    def _enter_intake(self) -> None:
        """Count a request in. Raises RequestError when too many are there already."""
        limit = self._config.max_queued_requests
        with self._lock:
            if self._num_in_intake >= limit:
                retry_after_ms = self._running_loop().status.drain.retry_after_ms()
                raise RequestError(
                    f"At most {limit} requests can wait. Retry later.",
                    code="queue_full",
                    status=429,
                    retry_after_ms=retry_after_ms,
                )
            self._num_in_intake += 1

    def _leave_intake(self) -> None:
        with self._lock:
            self._num_in_intake -= 1

    def _prepare(self, seq_id: int, raw: RawRequest, request_class: RequestClass) -> None:
        loop = self._running_loop()
        try:
            assert self._intake is not None, "not started"
            prepared = _with_logprobs(raw, self._intake.prepare(raw, request_class.cache_salt))
            further = tuple(next(self._seq_ids) for _ in range(1, prepared.sampling.n))
            loop.post(Prepared(seq_id, prepared, request_class, further))
        except RequestError as error:
            loop.post(Rejected(seq_id, error))
        except Exception:
            log.exception("a request could not be prepared")
            loop.post(Rejected(seq_id, internal_error()))
        finally:
            self._leave_intake()


def _dispatcher_config(config: EngineConfig) -> DispatcherConfig:
    return DispatcherConfig(
        config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        policy=config.policy,
        tiers=config.tier_table(),
        tenants=config.tenant_table(),
        preemption=PreemptionConfig(config.max_preemptions, config.min_run_s),
    )


def _with_logprobs(raw: RawRequest, prepared: PreparedRequest) -> PreparedRequest:
    """Have the sampler report what the requested outputs need."""
    wanted = raw.return_logprobs or raw.return_cumulative_logprob
    if not wanted or prepared.sampling.logprobs is not None:
        return prepared
    return replace(prepared, sampling=replace(prepared.sampling, logprobs=0))
