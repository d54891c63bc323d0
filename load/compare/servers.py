"""One server at a time: started, waited for, ended with everything it started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.load.compare.contenders import Launch

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
# What a shell set for other programs must not reach the servers: each runs as it does by default.
_DROPPED = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")


class ServerError(RuntimeError):
    """A server that did not start; the end of its log says why."""


@contextmanager
def running(launch: Launch, port: int, log: Path) -> Iterator[int]:
    """Serve on 127.0.0.1:``port``; yields the process id. Raises ServerError.

    It leads a process group of its own, so that none of its children is left behind.
    """
    if not _is_free(port):
        raise ServerError(f"port {port} is taken; give another with --port")
    with log.open("wb") as out:
        process = subprocess.Popen(
            launch.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment() | launch.environment,
            start_new_session=True,
        )
    patience_s = STOP_TIMEOUT_S
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}{launch.ready_path}", log)
        yield process.pid
    except (SystemExit, KeyboardInterrupt):
        patience_s = 0.0  # whoever ends us may not wait for a server that drains
        raise
    finally:
        _end(process, patience_s)
        _wait_free(port)


def leave_on_sigterm() -> None:
    """Ended from outside, this process still ends the server that it runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))


def environment() -> dict[str, str]:
    """This process's environment without what would change how a server runs."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith(("OMP_", "KMP_", "MKL_", "SHOAL_"))
    }


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-15:]
    raise ServerError("\n".join(["it did not become ready", *tail]))


def _wait_free(port: int) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not _is_free(port):
        if time.monotonic() > deadline:
            raise ServerError(f"port {port} is still taken after the server's end")
        time.sleep(0.1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
