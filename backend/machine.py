"""What this machine, or the container's share of it, offers."""

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")
# glibc's malloc.h, and the values that its thresholds reach by themselves as memory comes and goes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 * 2**20, 32 * 2**20
# While loading: above the temporaries of quantising (1 MiB), so that their memory is used again.
_LOADING_MMAP_BYTES, _LOADING_TRIM_BYTES = 5 * 2**18, 16 * 2**20


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
    available = _available_bytes()
    limit = _read_number(CGROUP / "memory.max")
    used = _read_number(CGROUP / "memory.current")
    if limit is None or used is None:
        return available
    # The page cache counts as used there, yet gives way.
    return min(available, limit - used + _inactive_file_bytes())


@contextlib.contextmanager
def freeing_at_once() -> Iterator[None]:
    """While a model is loaded, what is large goes back to the system as soon as it is freed.

    By itself the allocator comes to keep pieces of up to 32 MiB for later, and what stays lies
    between them. It does so again afterwards, when steps ask for the same sizes again and again.
    """
    _set_thresholds(_LOADING_MMAP_BYTES, _LOADING_TRIM_BYTES)
    try:
        yield
    finally:
        _set_thresholds(_MMAP_BYTES, _TRIM_BYTES)
        return_freed_memory()


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    """From which size on memory is asked of the system for itself, and how much free memory at the
    heap's end goes back to it. Without an allocator that can do this nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
        library.mallopt(_M_TRIM_THRESHOLD, trim_bytes)


def return_freed_memory() -> None:
    """Give the system back what this process has freed and its allocator keeps for later.

    Between what stays, much that was needed for a moment is kept so: after loading a model, as
    much as a third of it. Without an allocator that can do this nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Of this process. Asked often: psutil takes several times as long, here and below."""
    text = _read_file("/proc/self/statm")
    if text is None:  # not on Linux
        return int(psutil.Process().memory_info().rss)
    return int(text.split(None, 2)[1]) * mmap.PAGESIZE


def _available_bytes() -> int:
    text = _read_file("/proc/meminfo") or b""
    _, found, after = text.partition(b"MemAvailable:")
    return int(after.split(None, 1)[0]) * 1024 if found else int(psutil.virtual_memory().available)


def _read_number(path: Path) -> int | None:
    text = (_read_file(path) or b"").strip()
    return int(text) if text.isdigit() else None


def _read_file(path: Path | str) -> bytes | None:
    """Of a system's small file; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


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
