"""CPU time of this process and of those it started, by what they are. Linux only."""

import os
from collections import defaultdict
from pathlib import Path

# A part of the command line, and whose it is; the first that fits counts.
_PARTS = (
    ("shoal.backend.worker", "worker"),
    ("triton_python_backend_stub", "stub"),
    ("shoal.client.openai", "shim"),
    ("process_guard", "guards"),
    ("tritonserver", "tritonserver"),
    ("serve", "supervisor"),
)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far, by part of the server; "client": this process."""
    parents: dict[int, int] = {}
    times: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = _stat(entry)
            if fields:
                pid = int(entry.name)
                parents[pid] = int(fields[1])
                times[pid] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    total: dict[str, float] = defaultdict(float)
    for pid in times:
        if pid == os.getpid():
            total["client"] += times[pid]
        elif _descends(pid, parents):
            total[_part(pid)] += times[pid]
    return dict(total)


def cpu_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each part took, the most first."""
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def _stat(entry: Path) -> list[str]:
    """The fields of /proc/PID/stat after the name, from the state on; none when it has ended."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        pid = parents.get(pid, 0)
        if pid == os.getpid():
            return True
    return False


def _part(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "other"
    return next((name for mark, name in _PARTS if mark in command), "other")
