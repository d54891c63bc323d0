"""Runs one command and makes sure that nothing it started outlives it, or the supervisor.

Started by file path as ``python -I -S process_guard.py <command...>``, it imports the standard
library only, so that it costs little. Its standard input is a pipe held by the supervisor:

* SIGTERM or SIGINT to the guard is passed on to the command (a polite stop);
* end of file on standard input kills the command and everything below it at once. That is how a
  supervisor that was itself killed takes its servers with it;
* when the command ends, whatever it left behind is killed, and the guard ends with its status.

Being the subreaper, the guard adopts every orphan below it, so it can find them all.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_WAIT_S = 10.0


def main(command: list[str]) -> NoReturn:
    """Run ``command`` under guard and exit with its status."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup = _signal_pipe()
    guard_pid = os.getpid()

    stack_bytes = int(os.environ.pop("SHOAL_GUARD_STACK_BYTES", "0"))

    def prepare_child() -> None:
        if stack_bytes:
            hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
            unlimited = hard == resource.RLIM_INFINITY
            soft = stack_bytes if unlimited else min(stack_bytes, hard)
            resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard_pid:
                os._exit(1)

    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=prepare_child, process_group=0
        )
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    status = _watch(child.pid, wakeup)
    kill_descendants()
    os._exit(status)


def _signal_pipe() -> int:
    """A file descriptor that yields the number of each signal as a byte."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return receiver


def _watch(pid: int, wakeup: int) -> int:
    """Wait until the command ends or the supervisor is gone; returns the exit status."""
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if 0 in ready and not os.read(0, 1024):
            return 137
        if wakeup in ready:
            for number in os.read(wakeup, 64):
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            status = _reap(pid)
            if status is not None:
                return status


def _reap(pid: int) -> int | None:
    """Collect dead children, adopted ones too; the exit status if ``pid`` was among them."""
    found = None
    while True:
        try:
            dead, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if dead == 0:
            return found
        if dead == pid:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """Kill everything below this process, until nothing is left."""
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        below = descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        if not below:
            return
        time.sleep(0.02)


def kill_session(session: int) -> None:
    """Kill what is left of a session whose guard is dead: a guard that was itself killed."""
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        members = [entry.pid for entry in processes() if entry.session == session]
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            return
        time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Pids of all live processes below ``root``."""
    children: dict[int, list[int]] = {}
    for entry in processes():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: list[int] = []
    front = [root]
    while front:
        below = children.get(front.pop(), ())
        found += below
        front += below
    return found


class ProcessEntry(NamedTuple):
    """What /proc says of a live process."""

    pid: int
    parent: int
    session: int


def processes() -> Iterator[ProcessEntry]:
    """All live processes; none where there is no /proc."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # pid (name) state parent group session: the name may hold spaces and parentheses.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] != b"Z":
            yield ProcessEntry(int(name), int(fields[1]), int(fields[3]))


if __name__ == "__main__":
    main(sys.argv[1:])
