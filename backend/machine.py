"""What this machine, or the container's share of it, offers."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def num_usable_cpus() -> int:
    """Cores that this process may use, a container's quota included."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cpu_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def _cpu_quota() -> float | None:
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def available_memory(device: torch.device) -> int:
    """Free bytes on the device; on the CPU within the container's limit too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit = _read_number(CGROUP / "memory.max")
    used = _read_number(CGROUP / "memory.current")
    if limit is None or used is None:
        return available
    # The page cache counts as used there, yet gives way.
    return min(available, limit - used + _inactive_file_bytes())


def return_freed_memory() -> None:
    """Give the system back what this process has freed and its allocator keeps for later.

    Between what stays, much that was needed for a moment is kept so: after loading a model, as
    much as a third of it. Without an allocator that can do this nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes() -> int:
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "inactive_file" and value.isdigit():
            return int(value)
    return 0
