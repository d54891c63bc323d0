"""How much memory serving takes: the worker's peak against a bound, and the other processes'.

    python -m shoal.load.memory [--bits bf16,int8,int4] [--report load/reports/memory.md]

The bound is 1.3 times the weights as they are served, the KV pool, and 300 MB. Peaks are the
kernel's own (VmHWM), read when the model is loaded, after a closed loop of 32 streams, and after
one of longer prompts that goes through the whole pool.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

from shoal.backend.quantization.plan import memory_ratio, plan_formats
from shoal.backend.weights.checkpoint_folder import weight_files
from shoal.backend.weights.safetensors_header import SafetensorsHeader
from shoal.load.compare.client import Client, measure_closed_loop
from shoal.load.compare.contenders import (
    BITS,
    OURS,
    Contender,
    MissingError,
    checkpoint,
    launch_ours,
)
from shoal.load.compare.event_stream import StreamError
from shoal.load.compare.prompts import RandomWords
from shoal.load.compare.report import TITLES
from shoal.load.compare.servers import ServerError, leave_on_sigterm, running
from shoal.load.report import markdown_table
from shoal.load.scheduler_cost import cpu_name

MB = 10**6
MIB = 2**20
WEIGHTS_FACTOR = 1.3
EXTRA = 300 * MB
STREAMS = 32
LOADS = {"32 streams, 128 in": (128, 64), "32 streams, 1,024 in": (1024, 32)}  # tokens, requests
NUM_OUTPUTS = 128
# What a process is, by a word of its command line; the first that fits.
_ROLES = (
    ("shoal.backend.worker", "worker"),
    ("python_backend_stub", "stub"),
    ("tritonserver", "tritonserver"),
    ("client.openai", "OpenAI endpoint"),
)
_OTHER = "supervisor and guards"


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of each kind of process, at a time."""

    when: str
    parts: dict[str, int]

    @property
    def worker(self) -> int:
        return self.parts.get("worker", 0)

    @property
    def whole(self) -> int:
        """Pages that several processes share count in each."""
        return sum(self.parts.values())


def main(
    model: str = "smollm2",
    bits: Annotated[str, typer.Option(help="Any of bf16, int8, int4.")] = ",".join(BITS),
    kv_mib: Annotated[int, typer.Option(help="The KV pool.")] = 256,
    folder: Annotated[
        Path, typer.Option(envvar="SHOAL_PEERS", help="Where the checkpoint is.")
    ] = Path("~/peers"),
    port: Annotated[int, typer.Option(help="Of the server, and the three after it.")] = 19160,
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Measure, print, and write a report if asked. Exit code 1: a worker is above its bound."""
    kinds = bits.split(",")
    if unknown := [kind for kind in kinds if kind not in BITS]:
        sys.exit(f"error: --bits has {unknown[0]!r}; allowed: {', '.join(BITS)}.")
    leave_on_sigterm()
    where = folder.expanduser().absolute()
    rows: list[tuple[str, ...]] = []
    is_above = False
    try:
        weights_folder = checkpoint(where, model)
        for kind in kinds:
            weights = served_weights(weights_folder, kind)
            allowed = bound(weights, kv_mib * MIB)
            for peak in measure(Contender(OURS, model, kind), where, port, kv_mib):
                rows.append(_row(kind, weights, allowed, peak))
                is_above |= peak.worker > allowed
                print(f"{kind}, {peak.when}: {peak.parts}", flush=True)
    except (MissingError, ServerError, StreamError) as error:
        sys.exit(f"error: {error}")
    lines = [*_head(model, kv_mib), *markdown_table(_HEADER, rows)]
    print("\n".join(lines))
    if report is not None:
        report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(int(is_above))


def bound(weights: int, kv_pool: int) -> int:
    """The most that a worker may take. All in bytes."""
    return int(WEIGHTS_FACTOR * weights) + kv_pool + EXTRA


def served_weights(folder: Path, bits: str) -> int:
    """Bytes of a 16-bit checkpoint's weights as they are kept in memory."""
    entries = {
        name: entry
        for path in weight_files(folder)
        for name, entry in SafetensorsHeader(path).tensors.items()
    }
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    shapes = {name: entry.shape for name, entry in entries.items()}
    formats = plan_formats(shapes, "none" if bits == "bf16" else bits)
    return int(num_bytes * memory_ratio(shapes, formats))


def measure(contender: Contender, folder: Path, port: int, kv_mib: int) -> list[Peak]:
    """A server's peaks: loaded, and after each of LOADS."""
    with tempfile.TemporaryDirectory(prefix="shoal-memory-") as name:
        work = Path(name)
        start = launch_ours(contender, folder, port, work, {"kv_cache_mib": kv_mib})
        with running(start, port, work / "server.log") as pid:
            peaks = [peak_of(pid, "loaded")]
            client = Client(port, start.served_name)
            for when, (num_prompt, requests) in LOADS.items():
                words = RandomWords(checkpoint(folder, contender.model), num_prompt)
                lengths = (num_prompt, NUM_OUTPUTS)
                asyncio.run(measure_closed_loop(client, words, STREAMS, requests, lengths))
                peaks.append(peak_of(pid, when))
    return peaks


def peak_of(pid: int, when: str) -> Peak:
    """The peaks so far of a process and all below it."""
    parent = psutil.Process(pid)
    parts: dict[str, int] = {}
    for process in [parent, *parent.children(recursive=True)]:
        status = Path(f"/proc/{process.pid}/status")
        try:
            role = role_of(process.cmdline())
            parts[role] = parts.get(role, 0) + high_water(status.read_text(encoding="utf-8"))
        except (OSError, psutil.Error):
            continue  # it ended meanwhile
    return Peak(when, parts)


def role_of(command: Sequence[str]) -> str:
    """What one of our processes is, by its command line."""
    text = " ".join(command)
    return next((role for word, role in _ROLES if word in text), _OTHER)


def high_water(status: str) -> int:
    """Bytes, of the text of ``/proc/PID/status``; 0 where it does not tell."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


_HEADER = ("bits", "when", "weights, MB", "worker, MB", "bound, MB", "of the bound",
           "Triton and stub, MB", "endpoint, MB", "others, MB", "all, MB")  # fmt: skip


def _row(bits: str, weights: int, allowed: int, peak: Peak) -> tuple[str, ...]:
    triton = peak.parts.get("tritonserver", 0) + peak.parts.get("stub", 0)
    sizes = (triton, peak.parts.get("OpenAI endpoint", 0), peak.parts.get(_OTHER, 0), peak.whole)
    return (
        bits,
        peak.when,
        f"{weights / MB:.0f}",
        f"{peak.worker / MB:.0f}",
        f"{allowed / MB:.0f}",
        f"{peak.worker / allowed:.0%}",
        *(f"{size / MB:.0f}" for size in sizes),
    )


def _head(model: str, kv_mib: int) -> list[str]:
    return [
        "# Memory",
        "",
        "`python -m shoal.load.memory --report load/reports/memory.md` makes this page. "
        f"{TITLES.get(model, model)} on a CPU ({cpu_name()}), a KV pool of {kv_mib} MiB, other "
        f"settings as they are by default. Bound of the worker: {WEIGHTS_FACTOR} × the weights as "
        f"they are served + the pool + {EXTRA // MB} MB. Each figure is the highest resident size "
        "since the process began, by the kernel's count; pages that processes share count in "
        f"each. The loads are closed loops of {STREAMS} streams, {NUM_OUTPUTS} tokens out; the "
        "second goes through more tokens than the pool holds, so that all of it is in use.",
        "",
    ]


if __name__ == "__main__":
    typer.run(main)
