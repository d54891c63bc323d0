"""One child of the supervisor: started under a guard, its output kept in a file and shown."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.client.cli.process_guard import kill_session

GUARD = Path(__file__).with_name("process_guard.py")
TAIL_LINES = 40
MAX_LOG_BYTES = 32 * 2**20
LINE_LIMIT = 2**20

LineSink = Callable[[str, str], None]  # (process name, line)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run and where its output goes."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_file: Path
    folder: Path | None = None  # to run in; None: ours


@dataclass(slots=True)
class Backoff:
    """Seconds to wait before a restart: doubled each time, reset by a good run."""

    first_s: float = 0.5
    longest_s: float = 30.0
    good_run_s: float = 60.0
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def after_run_of(self, uptime_s: float) -> float:
        """The wait after a run that lasted ``uptime_s``. Mutates."""
        if uptime_s >= self.good_run_s:
            self._next_s = self.first_s
        wait_s = self._next_s
        self._next_s = min(self._next_s * 2, self.longest_s)
        return wait_s


class ManagedProcess:
    """A running command. Whatever it starts ends with it, and it ends with this process."""

    def __init__(self, spec: ProcessSpec, on_line: LineSink) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[int] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._output: asyncio.ReadTransport | None = None
        self._started = 0.0
        self._log = RotatingLog(spec.log_file)

    async def start(self) -> None:
        """Start it, in a session of its own so that the terminal's Ctrl-C reaches only us."""
        loop = asyncio.get_running_loop()
        self._log.open()
        self._started = loop.time()
        self._ended = loop.create_future()
        # Not asyncio's own subprocess: its wait() also waits for the pipes, which an orphan of a
        # killed guard would hold open.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), *self.spec.command],
            stdin=subprocess.PIPE,  # its end of file is what kills an orphaned guard
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self.spec.environment),
            cwd=self.spec.folder,
            start_new_session=True,
        )
        self._process = process
        threading.Thread(target=self._await_end, args=(loop, process), daemon=True).start()
        stream = asyncio.StreamReader(limit=LINE_LIMIT)
        self._output, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), process.stdout
        )
        self._reader = asyncio.create_task(self._read(stream), name=f"output of {self.spec.name}")

    def _await_end(
        self, loop: asyncio.AbstractEventLoop, process: "subprocess.Popen[bytes]"
    ) -> None:
        """In a thread of its own: waits for the guard and clears up should it have been killed."""
        code = process.wait()
        kill_session(process.pid)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._set_ended, code)

    def _set_ended(self, code: int) -> None:
        assert self._ended is not None
        self._ended.set_result(code)

    @property
    def pid(self) -> int | None:
        """The guard's pid; the command is its only child at first."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._ended is not None and not self._ended.done()

    @property
    def uptime_s(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    async def wait(self) -> int:
        """Wait until it has ended and its output is read; returns the exit status."""
        assert self._ended is not None
        code = await asyncio.shield(self._ended)
        if self._reader is not None:
            # A descendant that left the session may keep the pipe open: do not wait for it.
            await asyncio.wait({self._reader}, timeout=1.0)
            self._reader.cancel()
        if self._output is not None:
            self._output.close()
        self.kill()  # closes our end of the guard's standard input
        self._log.close()
        return code

    def terminate(self) -> None:
        """Ask it to end in its own time."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Have the guard kill it and everything below it at once."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    async def stop(self, patience_s: float, hurry: asyncio.Event | None = None) -> bool:
        """End it politely, by force after ``patience_s`` or when ``hurry`` is set.

        Returns whether it ended by itself.
        """
        if not self.is_running:
            return True
        self.terminate()
        ended = asyncio.create_task(self.wait())
        hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait(
            {ended, hurried}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()
        polite = ended.done()
        if not polite:
            self.kill()
        await ended
        return polite

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # longer than LINE_LIMIT: the stream has dropped it
                continue
            if not raw:
                return
            line = raw.decode("utf-8", errors="replace").rstrip()
            self.tail.append(line)
            self._log.write(line)
            self._on_line(self.spec.name, line)


class RotatingLog:
    """A log file that is moved to ``<name>.1`` when a new run starts or it has grown large."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._file: int | None = None
        self._size = 0

    def open(self) -> None:
        """Begin a new file; the last one is kept under its other name."""
        self.close()
        if self.path.exists():
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._size = 0

    def write(self, line: str) -> None:
        """Append a line. A full disk must not stop the server: the line is then lost."""
        if self._file is None:
            return
        data = (line + "\n").encode("utf-8")
        try:
            os.write(self._file, data)
        except OSError:
            return
        self._size += len(data)
        if self._size >= self.max_bytes:
            self.open()

    def close(self) -> None:
        """Close; later lines are dropped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
