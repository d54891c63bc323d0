"""What this machine gives at best just now: reading memory, and multiplying matrices.

    python -m shoal.load.compare.limits

A process of its own, since it takes a quarter of a gigabyte; prints one JSON object.
"""

import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from shoal.backend.machine import num_usable_cpus
from shoal.kernels.huge_pages import huge_empty
from shoal.load.compare.roofline import Peaks

READ_BYTES = 256 * 2**20
SIDES = (512, 768, 1024)  # of square matrices; the best counts
SECONDS = 1.0  # of tries at each, of which the best counts
GLANCE_SECONDS = 0.02  # the same, between what is measured against it


class Limits(msgspec.Struct, frozen=True):
    """The best of several tries on all cores; 10^9 a second."""

    read_gb: float
    bf16_gflop: float
    int8_gop: float


def measure_limits() -> Limits:
    """About seven seconds."""
    torch.set_num_threads(num_usable_cpus())
    buffer = huge_empty([READ_BYTES // 4], torch.float32).fill_(1)
    return Limits(
        read_gb=round(READ_BYTES / _best(buffer.sum) / 1e9, 2),
        bf16_gflop=round(max(map(_bf16_rate, SIDES)), 1),
        int8_gop=round(max(map(_int8_rate, SIDES)), 1),
    )


class Glances:
    """What the machine gives at this moment, as often as asked, by the threads that ask.

    A virtual machine's limits change within seconds, as its cores are moved about.
    """

    def __init__(self, bits: str) -> None:
        self._buffer = huge_empty([READ_BYTES // 4], torch.float32).fill_(1)
        self._multiply = partial(_bf16_rate if bits == "bf16" else _int8_rate, SIDES[1])

    def take(self) -> Peaks:
        """About 0.07 seconds."""
        read = READ_BYTES / _best(self._buffer.sum, GLANCE_SECONDS)
        return Peaks(read, 1e9 * self._multiply(GLANCE_SECONDS))


def _bf16_rate(side: int, seconds: float = SECONDS) -> float:
    square = torch.randn(side, side).to(torch.bfloat16)
    return 2 * side**3 / _best(lambda: square @ square, seconds) / 1e9


def _int8_rate(side: int, seconds: float = SECONDS) -> float:
    square = torch.randint(-127, 127, (side, side), dtype=torch.int8)
    return float(2 * side**3 / _best(lambda: torch._int_mm(square, square), seconds) / 1e9)


def _best(run: Callable[[], object], seconds: float = SECONDS) -> float:
    """Seconds of the fastest try, after one that does not count."""
    run()
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while (start := time.perf_counter()) < deadline:
        run()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    print(msgspec.json.encode(measure_limits()).decode())
