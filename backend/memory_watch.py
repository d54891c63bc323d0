"""How much memory the worker uses, how much it may, and how to give some back."""

import ctypes
import ctypes.util
import sys
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.machine import available_memory, resident_bytes

MIB = 2**20
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes: the most that may be used, and what of it is left."""

    ceiling: int
    headroom: int


class MemoryWatch(Protocol):
    """Reads the memory of one device."""

    def read(self) -> MemoryReading: ...

    def release(self) -> None:
        """Give back what the allocator keeps and nobody uses."""
        ...


class HostMemoryWatch:
    """The process's resident memory under a ceiling, and what the machine has left.

    Without a ceiling of its own the process may take all that was available when it had loaded.
    ``host_kv_bytes`` are taken as its blocks are first written and never given back: a ceiling
    without room for them would leave a worker at critical pressure for good.
    """

    def __init__(self, ceiling_bytes: int | None = None, host_kv_bytes: int = 0) -> None:
        used = resident_bytes()
        needed = used + host_kv_bytes
        if ceiling_bytes is not None and ceiling_bytes <= needed:
            beside = f", and host_kv_mib {host_kv_bytes // MIB} more" if host_kv_bytes else ""
            least = (needed + needed // 8) // MIB + 64
            raise ConfigError(
                f"memory_ceiling_mib {ceiling_bytes // MIB}: the loaded worker takes "
                f"{used // MIB} MiB{beside}: set it to at least {least}."
            )
        self._ceiling = ceiling_bytes or used + available_memory(CPU)
        self._trim = _malloc_trim()

    def read(self) -> MemoryReading:
        left = self._ceiling - resident_bytes()
        return MemoryReading(self._ceiling, min(left, available_memory(CPU)))

    def release(self) -> None:
        if self._trim is not None:
            self._trim(0)


class CudaMemoryWatch:
    """The device's free memory, with what torch's allocator has reserved and not given out."""

    def __init__(self, device: torch.device, ceiling_bytes: int | None = None) -> None:
        self._device = device
        self._ceiling = ceiling_bytes

    def read(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        left = free + torch.cuda.memory_reserved(self._device) - allocated
        if self._ceiling is None:
            return MemoryReading(total, left)
        return MemoryReading(self._ceiling, min(left, self._ceiling - allocated))

    def release(self) -> None:
        torch.cuda.empty_cache()


def make_memory_watch(
    device: torch.device, ceiling_mib: int | None, host_kv_bytes: int = 0
) -> MemoryWatch:
    """Raises ConfigError for a ceiling below what is used already, or will be."""
    ceiling_bytes = None if ceiling_mib is None else ceiling_mib * MIB
    if device.type == "cuda":
        return CudaMemoryWatch(device, ceiling_bytes)
    return HostMemoryWatch(ceiling_bytes, host_kv_bytes)


def _malloc_trim() -> "ctypes._NamedFuncPointer | None":
    """glibc's, which gives free pages back to the system; None elsewhere."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
