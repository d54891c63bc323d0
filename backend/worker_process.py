"""The parent's end of a worker: the process, its socket and its death."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from shoal.backend.engine_config import EngineConfig
from shoal.backend.messages import FromWorker, Shutdown, ToWorker

# sun_path holds 108 bytes with its end mark on Linux and 104 on macOS.
MAX_SOCKET_PATH = 100
# The most messages one receive() decodes, so that a fast worker cannot hold its reader for ever.
MAX_MESSAGES_PER_RECEIVE = 1024


class WorkerProcess:
    """One generation of a worker: started once, never restarted; its successor is a new object.

    Not thread-safe: one thread owns it, and ``start`` must run in a thread that outlives the
    worker, since Linux ends the worker when the *thread* that started it ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        run_dir: Path,
        module: str = "shoal.backend.worker",
        env: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._module = module
        self._env = env or {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._socket_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_fd = -1

    def start(self) -> None:
        """Bind the socket and start the process; its messages then tell how loading goes."""
        assert self._process is None, "a WorkerProcess starts once"
        self._socket_dir = _make_socket_dir(self._run_dir)
        path = self._socket_dir / "worker.sock"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        # Sending must never block: the dispatcher bounds what is in flight.
        self._socket.sndhwm = 0
        self._socket.bind(f"ipc://{path}")
        path.chmod(0o600)
        try:
            self._spawn(path)
        except BaseException:
            self.close()
            raise

    def _spawn(self, path: Path) -> None:
        # Each side holds one end of two pipes that carry nothing: end of file means death.
        self._exit_fd, worker_end = os.pipe()
        command = [sys.executable, "-P", "-m", self._module, "--socket", str(path)]
        command += ["--config", msgspec.json.encode(self._config).decode()]
        command += ["--parent-pid", str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=2,  # whatever a library prints belongs in the log
                pass_fds=(worker_end,),
                env={**os.environ, **_thread_env(self._config), **self._env},
            )
        finally:
            os.close(worker_end)

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """For a zmq.Poller (POLLIN: ``receive`` has something)."""
        assert self._socket is not None, "not started, or closed"
        return self._socket

    @property
    def exit_fd(self) -> int:
        """Becomes readable when the worker has died; for a poller."""
        return self._exit_fd

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """None while alive; negative: the signal that ended it."""
        return self._process.poll() if self._process else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def describe_exit(self) -> str:
        """Why it is gone, in words for the operator."""
        code = self.exit_code
        if code is None:
            return "still running" if self._process else "not started"
        if code >= 0:
            return f"exit code {code}"
        hint = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def send(self, message: ToWorker) -> bool:
        """Queue a message without blocking. False: the worker is gone or not connected yet."""
        if self._socket is None:
            return False
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: int = 0) -> list[FromWorker]:
        """Everything that has arrived, waiting at most ``timeout_ms`` for the first message.

        What a worker sent before it died can still be received.
        """
        if self._socket is None or not self._socket.poll(timeout_ms):
            return []
        messages: list[FromWorker] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < MAX_MESSAGES_PER_RECEIVE:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def kill(self) -> None:
        """End the process at once, hung or not, and reap it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self, timeout_s: float = 2.0) -> None:
        """Ask the worker to leave, kill it if it does not, and remove the socket. Idempotent."""
        if self._process is not None:
            if self.send(Shutdown()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
            self.kill()
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._exit_fd >= 0:
            os.close(self._exit_fd)
            self._exit_fd = -1
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None


def _make_socket_dir(run_dir: Path) -> Path:
    """A new folder of mode 0700, in the system's temporary folder where run_dir is too deep."""
    run_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="worker-", dir=run_dir.resolve()))
    if len(os.fsencode(folder / "worker.sock")) > MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="shoal-worker-"))
    return folder


def _thread_env(config: EngineConfig) -> dict[str, str]:
    """OpenMP settings, which are read once, before the worker's own code runs.

    Its threads must not spin between parallel regions: they would take the cores from the server's
    other processes, and a step on busy cores becomes several times slower.
    """
    env = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    if "OMP_WAIT_POLICY" not in os.environ:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    return env
