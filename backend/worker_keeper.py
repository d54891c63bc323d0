"""Keeps one worker process running: starts it, watches it, replaces it when it dies or hangs."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from shoal.backend.messages import (
    FromWorker,
    LoadFailed,
    LoadProgress,
    StepResults,
    ToWorker,
    WorkerReady,
    WorkerStatus,
)

MAX_BACKOFF_S = 30.0
FIRST_BACKOFF_S = 0.5
# A worker that served for so long was healthy: its successor starts at once.
HEALTHY_S = 10.0
# For a worker that has closed its socket to end by itself, and so to tell how.
LEAVING_S = 1.0

log = logging.getLogger(__name__)


class WorkerLink(Protocol):
    """What the keeper asks of a WorkerProcess."""

    def start(self) -> None: ...
    def send(self, message: ToWorker) -> bool: ...
    def receive(self, timeout_ms: int = 0) -> list[FromWorker]: ...
    def is_alive(self) -> bool: ...
    def describe_exit(self) -> str: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    @property
    def socket(self) -> Any: ...
    @property
    def wants_to_write(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def exit_fd(self) -> int: ...


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker is ready; ``worker_id`` is new with each generation."""

    worker_id: int
    ready: WorkerReady


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker is gone. ``refused``: it said itself that it cannot start, and why."""

    worker_id: int
    reason: str
    was_ready: bool
    refused: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A message of a live worker."""

    worker_id: int
    message: LoadProgress | WorkerStatus | StepResults


WorkerEvent = WorkerUp | WorkerDown | WorkerSaid


class WorkerKeeper:
    """Owned by one thread, which must live as long as the worker (see WorkerProcess).

    ``poll`` does all the work and never blocks, except for the start of a process.
    """

    def __init__(
        self,
        spawn: Callable[[], WorkerLink],
        start_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._spawn = spawn
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._link: WorkerLink | None = None
        self._worker_id = 0
        self._since = 0.0  # start of loading, then of serving
        self._start_at = 0.0
        self._over_at = math.inf  # when it had closed its socket
        self._failures = 0  # in a row
        self.state = WorkerState.DOWN
        self.heard_at = 0.0
        self.num_starts = 0
        self.failed_starts = 0  # in a row, without ever being ready

    @property
    def link(self) -> WorkerLink | None:
        """The current worker, for a poller; None between two workers."""
        return self._link

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)

    def poll(self, now: float) -> list[WorkerEvent]:
        """Take what the worker sent, look whether it lives, start a new one when it is time."""
        if self._link is None:
            return self._start(now) if now >= self._start_at else []
        messages = self._link.receive(0)
        if messages:
            self.heard_at = now
            return self._take(messages, now)
        fault = self._fault(now)
        return [self._take_down(fault, now)] if fault else []

    def send(self, message: ToWorker) -> None:
        """Send to the ready worker. Lost when it has just died: its sequences are replayed then."""
        if self._link is not None and self.state is WorkerState.READY:
            self._link.send(message)

    def close(self) -> None:
        """End the worker."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self.state = WorkerState.DOWN

    def _start(self, now: float) -> list[WorkerEvent]:
        self._worker_id += 1
        self.num_starts += 1
        self._since = self.heard_at = now
        self._over_at = math.inf
        self.state = WorkerState.LOADING
        link = self._spawn()
        try:
            link.start()
        except OSError as error:
            log.error("the worker process cannot be started: %s", error)
            return [self._take_down(f"it cannot be started ({error.strerror})", now)]
        self._link = link
        return []

    def _take(self, messages: list[FromWorker], now: float) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        for message in messages:
            if isinstance(message, LoadFailed):
                events.append(self._take_down(message.message, now, refused=True))
                break
            if isinstance(message, WorkerReady):
                self.state = WorkerState.READY
                self._since = now
                self.failed_starts = 0
                events.append(WorkerUp(self._worker_id, message))
            else:
                events.append(WorkerSaid(self._worker_id, message))
        return events

    def _fault(self, now: float) -> str | None:
        assert self._link is not None
        if not self._link.is_alive():
            return self._link.describe_exit()
        if self._link.is_over:  # it is leaving, and can be told nothing more
            self._over_at = min(self._over_at, now)
        if now - self._over_at > LEAVING_S:
            return "it closed its socket and did not end"
        if self.state is WorkerState.LOADING and now - self._since > self._start_timeout_s:
            return f"not ready after worker_start_timeout_s = {self._start_timeout_s:g}"
        if self.state is WorkerState.READY and now - self.heard_at > self._stall_timeout_s:
            return f"silent for worker_stall_timeout_s = {self._stall_timeout_s:g}"
        return None

    def _take_down(self, reason: str, now: float, refused: bool = False) -> WorkerDown:
        was_ready = self.state is WorkerState.READY
        healthy = was_ready and now - self._since >= HEALTHY_S
        self._failures = 1 if healthy else self._failures + 1
        if not was_ready:
            self.failed_starts += 1
        self._start_at = now + self._backoff()
        self.state = WorkerState.DOWN
        if self._link is not None:
            self._link.kill()
            self._link.close()
            self._link = None
        return WorkerDown(self._worker_id, reason, was_ready, refused)

    def _backoff(self) -> float:
        if self._failures <= 1:
            return 0.0
        return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures - 2, 16))
