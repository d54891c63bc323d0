"""A process whose parent dies must end, whatever its other threads wait for."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from shoal.backend import parent_watch
from shoal.backend.parent_watch import ParentWatch

WAIT_S = 20.0

_CHILD = """
import os, threading
from shoal.backend.parent_watch import ParentWatch
ParentWatch(lambda: os._exit(1), poll_s=0.01)
print(os.getpid(), flush=True)
threading.Event().wait()
"""
_PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {_CHILD!r}])
"""


def test_a_child_ends_with_its_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait(WAIT_S)


def test_a_living_parent_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    polled, died = threading.Semaphore(0), threading.Event()
    ppid = parent_watch.os.getppid()

    def getppid() -> int:
        polled.release()
        return ppid

    monkeypatch.setattr(parent_watch.os, "getppid", getppid)
    watch = ParentWatch(died.set, poll_s=0.001)
    for _ in range(5):
        assert polled.acquire(timeout=WAIT_S)
    watch.close()
    assert not died.is_set()
