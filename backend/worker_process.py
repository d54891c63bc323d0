"""The parent's end of a worker: the process, its socket and its death."""

import contextlib
import os
import signal
import subprocess
import sys
from socket import socketpair

import msgspec

from shoal.backend.engine_config import EngineConfig
from shoal.backend.frames import FrameSocket
from shoal.backend.messages import FromWorker, Shutdown, ToWorker


class WorkerProcess:
    """One generation of a worker: started once, never restarted; its successor is a new object.

    Not thread-safe: one thread owns it, and ``start`` must run in a thread that outlives the
    worker, since Linux ends the worker when the *thread* that started it ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        module: str = "shoal.backend.worker",
        env: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._module = module
        self._env = env or {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._socket: FrameSocket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_fd = -1

    def start(self) -> None:
        """Start the process with its end of a socket pair, which has no name that anybody else
        could reach it by; its messages then tell how loading goes."""
        assert self._process is None, "a WorkerProcess starts once"
        ours, theirs = socketpair()
        self._socket = FrameSocket(ours)
        try:
            self._spawn(theirs.fileno())
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def _spawn(self, socket_fd: int) -> None:
        # Each side holds one end of two pipes that carry nothing: end of file means death.
        self._exit_fd, worker_end = os.pipe()
        command = [sys.executable, "-P", "-m", self._module, "--socket-fd", str(socket_fd)]
        command += ["--config", msgspec.json.encode(self._config).decode()]
        command += ["--parent-pid", str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=2,  # whatever a library prints belongs in the log
                pass_fds=(worker_end, socket_fd),
                env={**os.environ, **_thread_env(self._config), **self._env},
            )
        finally:
            os.close(worker_end)

    @property
    def socket(self) -> FrameSocket:
        """For a poller; readable: ``receive`` has something."""
        assert self._socket is not None, "not started, or closed"
        return self._socket

    @property
    def is_over(self) -> bool:
        """Whether it has closed its end, as when it leaves or is gone."""
        return self._socket is not None and self._socket.is_over

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

    @property
    def wants_to_write(self) -> bool:
        """Whether messages wait for room; ``receive`` sends them on."""
        return self._socket is not None and self._socket.num_waiting > 0

    def send(self, message: ToWorker) -> bool:
        """Queue a message without blocking: the dispatcher bounds what is in flight. False: the
        worker is gone."""
        return self._socket is not None and self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_ms: int = 0) -> list[FromWorker]:
        """Everything that has arrived, waiting at most ``timeout_ms`` for the first message.

        What a worker sent before it died can still be received.
        """
        if self._socket is None:
            return []
        self._socket.flush()
        return [self._decoder.decode(frame) for frame in self._socket.receive(timeout_ms)]

    def kill(self) -> None:
        """End the process at once, hung or not, and reap it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self, timeout_s: float = 2.0) -> None:
        """Ask the worker to leave, kill it if it does not, and close the socket. Idempotent."""
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
        if self._exit_fd >= 0:
            os.close(self._exit_fd)
            self._exit_fd = -1


def _thread_env(config: EngineConfig) -> dict[str, str]:
    """OpenMP settings, which are read once, before the worker's own code runs.

    Its threads must not spin between parallel regions: they would take the cores from the server's
    other processes, and a step on busy cores becomes several times slower.
    """
    env = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    if "OMP_WAIT_POLICY" not in os.environ:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    return env
