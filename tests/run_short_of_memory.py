"""Run as a process of its own: the same sequences with room, then under RLIMIT_AS. Prints JSON."""

import json
import resource
import sys
from pathlib import Path

import psutil
import torch
from builders import make_sequence
from tiny_runs import generate

from shoal.backend.memory_watch import MIB, MemoryReading
from shoal.backend.pressure_guard import PressureGuard
from shoal.backend.weights.loader import load_model

ROOM_MIB = 24  # a token's states between products take 128 KiB and more
CACHE_MIB = 34  # the addresses of the KV cache: a chunk of the arena, and its alignment


class NoWatch:
    """The limit is on addresses, of which resident memory says nothing: only failures count."""

    def read(self) -> MemoryReading:
        return MemoryReading(2**40, 2**40)

    def release(self) -> None:
        pass


def make_sequences():
    return [make_sequence(i, 100 + 150 * i, max_tokens=4, temperature=1.0) for i in range(3)]


def main() -> None:
    torch.set_num_threads(1)
    loaded = load_model(Path(sys.argv[1]), torch.float32)
    undisturbed = generate(loaded, make_sequences(), num_blocks=512)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (CACHE_MIB + ROOM_MIB) * MIB,) * 2)
    guard = PressureGuard(NoWatch(), 512)
    disturbed = generate(loaded, make_sequences(), guard=guard, num_blocks=512)
    report = {
        "undisturbed": undisturbed.texts,
        "disturbed": disturbed.texts,
        "failed": disturbed.failed,
        "num_failed_allocations": guard.num_failed_allocations,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
