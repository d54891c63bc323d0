"""The worker process: one engine, one thread that steps it, one socket to the dispatcher.

Started by ``WorkerProcess``. It serves nobody but the process that started it and ends with it.
"""

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.frames import FrameSocket
from shoal.backend.garbage import settle
from shoal.backend.held_outputs import HeldOutputs
from shoal.backend.messages import (
    AbortSequence,
    AddSequence,
    FromWorker,
    LoadFailed,
    LoadProgress,
    Shutdown,
    StepResults,
    ToWorker,
    WorkerReady,
    WorkerStatus,
)
from shoal.scheduler.outputs import StepOutput

IDLE_MS = 50  # the longest silence of an idle worker
MAX_UNREAD_BYTES = 4 * 2**20  # by a parent that is slow
LINGER_MS = 1000  # for it to read the last of them
REST_MS = 5  # for the next piece of a message that is larger than the socket holds: an image's
MAX_LOAD_MESSAGES = 200  # of one phase of loading
FIRST_TOKENS_MS = 2  # about what the server's other processes take to pass a token on
PR_SET_PDEATHSIG = 1

ProgressSink = Callable[[str, int, int], None]


class EngineLike(Protocol):
    """What the worker asks of an Engine."""

    @property
    def has_unfinished(self) -> bool: ...
    @property
    def made_progress(self) -> bool: ...
    @property
    def status(self) -> WorkerStatus: ...
    def add(self, message: AddSequence) -> None: ...
    def abort(self, seq_id: int) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def rest(self) -> None: ...


class ParentLink:
    """The worker's end of the socket."""

    def __init__(self, fd: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._socket = FrameSocket(socket.socket(fileno=fd))

    def send(self, message: FromWorker) -> None:
        """Waits only where much is unread: the parent never waits for us, so that cannot deadlock,
        but one that leaves has stopped reading and is still to be heard."""
        self._socket.send(self._encoder.encode(message))
        while self._socket.num_waiting > MAX_UNREAD_BYTES and not self._socket.is_over:
            self._socket.flush(timeout_ms=1000)

    def receive(self, timeout_ms: int) -> list[ToWorker]:
        """Everything that has arrived, waiting at most ``timeout_ms`` for the first message."""
        if self._socket.num_waiting:
            self._socket.flush()
        frames = self._socket.receive(timeout_ms, REST_MS)
        messages = [self._decoder.decode(frame) for frame in frames]
        return [*messages, Shutdown()] if self._socket.is_over else messages

    def close(self) -> None:
        self._socket.flush(timeout_ms=LINGER_MS)
        self._socket.close()


class Worker:
    """The loop around ``Engine.step``. It owns the engine."""

    def __init__(self, engine: EngineLike, link: ParentLink, leaves_no_core: bool = False) -> None:
        """``leaves_no_core``: during a step all cores are busy with it."""
        self._engine = engine
        self._link = link
        self._leaves_no_core = leaves_no_core
        self._held = HeldOutputs()
        self._leaving = False

    def run(self) -> None:
        """Step while there is work, wait for messages while there is none, until told to leave."""
        wait_ms = IDLE_MS
        while True:
            for message in self._link.receive(wait_ms):
                self._apply(message)
            if self._leaving:
                return
            wait_ms = self._turn()

    def _turn(self) -> int:
        """One step, or a sign of life; returns how long to wait for messages after it."""
        if not self._engine.has_unfinished:
            self._engine.rest()
            self._link.send(self._engine.status)
            return IDLE_MS
        started = time.monotonic()
        outputs = self._engine.step()
        step_s = time.monotonic() - started
        sent = self._held.take(outputs, step_s, self._engine.has_unfinished)
        if outputs and not sent:
            return 0
        status = self._engine.status
        self._link.send(StepResults(sent, status))
        if not self._engine.made_progress:
            # Nothing changes until a message comes: do not spin.
            return IDLE_MS
        if self._leaves_no_core and _all_have_just_begun(outputs, status):
            return FIRST_TOKENS_MS
        return 0

    def _apply(self, message: ToWorker) -> None:
        match message:
            case AddSequence():
                self._engine.add(message)
                if held := self._held.release():
                    self._link.send(StepResults(held, self._engine.status))
            case AbortSequence():
                self._engine.abort(message.seq_id)
                self._held.forget(message.seq_id)
            case Shutdown():
                self._leaving = True


def _all_have_just_begun(outputs: list[StepOutput], status: WorkerStatus) -> bool:
    """Whether all that runs got its first token from this step, so that somebody waits for that
    and nobody for the next."""
    if not outputs or not all(
        output.output_index == 0 and output.token is not None for output in outputs
    ):
        return False
    num_going_on = sum(output.finish_reason is None for output in outputs)
    return not status.num_waiting and status.num_running <= num_going_on


class LoadReporter:
    """Passes loading progress on, thinned out so that it never floods the socket."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._phase = ""
        self._last_done = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        stride = total // MAX_LOAD_MESSAGES
        if phase == self._phase and done < total and done < self._last_done + stride:
            return
        self._phase, self._last_done = phase, done
        self._link.send(LoadProgress(phase, done, total))


def die_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, in whatever way.

    The kernel does it on Linux; end of file on stdin does it elsewhere and when only the parent's
    side of the pipe is gone. The id check closes the gap before the kernel was told.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    threading.Thread(target=_leave_at_eof, name="parent-watch", daemon=True).start()


def _leave_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _ignore_signals() -> None:
    """Ctrl-C and a service manager's SIGTERM reach the whole group; the parent drains first and
    then tells the worker to leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Internal: started by the Shoal backend.")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--parent-pid", type=int, required=True)
    return parser.parse_args(argv)


def _load(link: ParentLink, config: EngineConfig) -> tuple[EngineLike, WorkerReady] | None:
    """Build the engine; on failure tell the parent why and return None."""
    try:
        # torch takes a second to import: only now, when the parent's death is already watched.
        link.send(LoadProgress("starting"))
        from shoal.backend.engine_builder import build_engine

        return build_engine(config, LoadReporter(link))
    except ConfigError as error:
        link.send(LoadFailed(str(error)))
    except Exception as error:
        traceback.print_exc()
        reason = str(error).strip().split("\n")[0][:200]
        link.send(LoadFailed(f"The worker cannot start: {type(error).__name__}: {reason}"))
    return None


def _leaves_no_core(config: EngineConfig, ready: WorkerReady) -> bool:
    num_threads = config.num_threads or sys.maxsize  # without a number it is all there are
    return ready.device == "cpu" and num_threads >= (os.cpu_count() or 1)


def main(argv: list[str] | None = None) -> int:
    """Load, say so, serve. Exit code 1: loading failed, and the parent was told why."""
    args = _parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s worker[%(process)d] %(levelname)s %(message)s"
    )
    _ignore_signals()
    die_with_parent(args.parent_pid)
    link = ParentLink(args.socket_fd)
    try:
        config = msgspec.json.decode(args.config, type=EngineConfig)
        loaded = _load(link, config)
        if loaded is None:
            return 1
        engine, ready = loaded
        settle()
        link.send(ready)
        Worker(engine, link, _leaves_no_core(config, ready)).run()
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # All is sent: taking a loaded model apart in good order would only cost seconds.
    os._exit(exit_code)
