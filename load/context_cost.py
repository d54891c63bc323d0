"""What a decode costs as its context grows, up to 8k tokens: a table and a plot.

    OMP_WAIT_POLICY=PASSIVE python load/context_cost.py [--rounds N] [--threads N] [--report FILE]

One sequence, whose steps are few and long: its context is split between the threads. The kinds of
KV cache and the contexts take turns, and the fastest of the rounds counts, so that whatever else
the machine does falls on none of them alone. A line is fitted to each kind's times. Writes a
Markdown report and a plot beside it.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.machine import num_usable_cpus
from shoal.backend.model_runner import build_forward_batch
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.catalogue import DEFAULT_MODEL, kernels_dir, resolve_weights
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import load_native
from shoal.load.kv_accuracy import BLOCK_SIZE, CPU, KINDS
from shoal.scheduler.outputs import ScheduledSequence
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

CONTEXTS = (64, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192)


@dataclass(frozen=True, slots=True)
class Line:
    """milliseconds = start + slope * context / 1000."""

    start: float
    slope: float
    largest_deviation: float  # of a measurement, as a share of the line
    explained: float  # share of the variance of the times (R²)

    @classmethod
    def fit(cls, times: list[float]) -> "Line":
        contexts = np.array(CONTEXTS) / 1000
        slope, start = np.polyfit(contexts, times, 1, w=1 / np.array(times))
        line = start + slope * contexts
        residual = float(np.square(np.array(times) - line).sum())
        explained = 1 - residual / float(np.square(np.array(times) - np.mean(times)).sum())
        return cls(start, slope, float(np.abs(np.array(times) / line - 1).max()), explained)


def measure(model: NativeDecoder, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a decode by kind of KV cache, one for each of CONTEXTS."""
    num_blocks = -(-CONTEXTS[-1] // BLOCK_SIZE)
    best = {name: [float("inf")] * len(CONTEXTS) for name in KINDS}
    caches = {
        name: PagedKVCache(
            model.config.kv_layout, [num_blocks], BLOCK_SIZE, stored, key_panels=True
        )
        for name, stored in KINDS.items()
    }
    # Blocks in disorder, as in a pool that has been in use.
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    greedy = SamplingParams(temperature=0.0)
    for _ in range(rounds):
        for idx, context in enumerate(CONTEXTS):
            sequence = Sequence(0, [7] * context, context, greedy, block_tables=[table])
            sequence.num_computed_tokens = context - 1
            batch = build_forward_batch(
                [ScheduledSequence(sequence, 1)], BLOCK_SIZE, CPU, chooses=True
            )
            for name, cache in caches.items():
                start = time.perf_counter()
                model.forward(batch, cache)
                best[name][idx] = min(best[name][idx], 1e3 * (time.perf_counter() - start))
    return best


def plot(best: dict[str, list[float]], lines: dict[str, Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for idx, (name, times) in enumerate(best.items()):
        line = lines[name]
        axes.plot(CONTEXTS, times, f"C{idx}o", label=name)
        axes.plot(CONTEXTS, [line.start + line.slope * c / 1000 for c in CONTEXTS], f"C{idx}-")
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("one decode, ms")
    axes.set_ylim(0)
    axes.set_title(f"Decoding one sequence of {DEFAULT_MODEL}")
    axes.grid(alpha=0.3)
    axes.legend(title="KV cache")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=num_usable_cpus())
    parser.add_argument(
        "--report", type=Path, default=Path(__file__).parent / "reports" / "context-cost.md"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = load_native(kernels_dir(), print)
    reference = load_model(resolve_weights(DEFAULT_MODEL), torch.bfloat16).model
    assert isinstance(reference, Decoder)
    load_before = os.getloadavg()[0]
    best = measure(NativeDecoder(reference, library), args.rounds)
    lines = {name: Line.fit(times) for name, times in best.items()}
    picture = args.report.with_suffix(".png")
    report = [
        "# A decode's cost as its context grows",
        "",
        f"Made by `python load/context_cost.py`. One sequence of {DEFAULT_MODEL} in bfloat16, "
        f"{args.threads} threads, {library.instructions}; milliseconds of a step, the fastest of "
        f"{args.rounds}. The machine's load average was {load_before:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after, on {num_usable_cpus()} cores.",
        "",
        f"| KV cache | {' | '.join(f'{context:,}' for context in CONTEXTS)} | line "
        "| largest deviation | R² |",
        "|---" * (len(CONTEXTS) + 4) + "|",
        *(
            f"| {name} | {' | '.join(f'{value:.1f}' for value in times)} "
            f"| {lines[name].start:.1f} + {lines[name].slope:.2f} per 1,000 tokens "
            f"| {lines[name].largest_deviation:.0%} | {lines[name].explained:.3f} |"
            for name, times in best.items()
        ),
        "",
        f"![decode time over context]({picture.name})",
    ]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    plot(best, lines, picture)
    args.report.write_text("\n".join(report) + "\n", encoding="utf-8")
    print(*report, sep="\n")


if __name__ == "__main__":
    main()
