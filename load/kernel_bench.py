"""The CPU kernels against the torch reference and this machine's limits.

    OMP_WAIT_POLICY=PASSIVE python load/kernel_bench.py [--threads N] [--rounds N] [--report FILE]

Reference and native take turns (A B A B ...) in one process and medians are compared, so that
whatever else the machine does falls on both. Steps are timed by the clock and by the CPU time of
all threads, which says more on a machine that is not quiet; products, which are short, by CPU time
on one thread. PASSIVE is how the worker runs. Writes a Markdown report.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.machine import num_usable_cpus
from shoal.backend.model_runner import Model, build_forward_batch
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.model_config import ModelConfig
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.catalogue import DEFAULT_MODEL, kernels_dir, resolve_weights
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import NativeLibrary, PackedLinear, load_native
from shoal.scheduler.outputs import ScheduledSequence
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

QUANTIZATIONS = ("none", "int8", "int4")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK_SIZE = 16
CONTEXT = 192
DECODE_BATCHES = (1, 8, 32, 64)
PREFILL = 512
CPU = torch.device("cpu")
# The products of SmolLM2-135M: QKV, output, gate and up, down, logits.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
HEIGHTS = (1, 8, 32, 128)
WORKING_SET = 64 * 2**20  # bytes of weights gone through, so that no cache holds them


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of one case, in seconds: by the clock, and of CPU time over all threads."""

    reference: float
    native: float
    reference_cpu: float
    native_cpu: float


def compare(
    reference: Callable[[], object], native: Callable[[], object], rounds: int
) -> Comparison:
    """Run both in turn, after a run of each that does not count."""
    wall: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for idx in range(rounds + 1):
        for run, walls, cpus in zip((reference, native), wall, cpu, strict=True):
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            if idx:
                walls.append(time.perf_counter() - start)
                cpus.append(time.process_time() - cpu_start)
    return Comparison(*(statistics.median(times) for times in (*wall, *cpu)))


def run_reference(states: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        functional.linear(states, weight)


def run_native(
    library: NativeLibrary, states: torch.Tensor, packed: list[PackedLinear], out: torch.Tensor
) -> None:
    for weight in packed:
        library.linear(states, weight, out=out)


def linear_rows(library: NativeLibrary, rounds: int) -> list[str]:
    rows = []
    torch.set_num_threads(1)
    for name, dtype in DTYPES.items():
        for out_features, in_features in SHAPES:
            size = out_features * in_features * dtype.itemsize
            weights = [
                torch.randn(out_features, in_features).to(dtype)
                for _ in range(max(1, WORKING_SET // size))
            ]
            packed = [library.pack_linear(weight) for weight in weights]
            for height in HEIGHTS:
                states = torch.randn(height, in_features).to(dtype)
                out = torch.empty(height, out_features)

                result = compare(
                    partial(run_reference, states, weights),
                    partial(run_native, library, states, packed, out),
                    rounds,
                )
                read = size * len(weights)
                flops = 2 * height * read / dtype.itemsize
                before, now = result.reference_cpu, result.native_cpu
                rows.append(
                    f"| {name} | {out_features} × {in_features} | {height} "
                    f"| {read / before / 1e9:.1f} | {read / now / 1e9:.1f} "
                    f"| {flops / before / 1e9:.0f} | {flops / now / 1e9:.0f} "
                    f"| {before / now:.2f} |"
                )
                print(rows[-1], flush=True)
    return rows


def make_cache(config: ModelConfig, dtype: torch.dtype, key_panels: bool = True) -> PagedKVCache:
    num_blocks = max(DECODE_BATCHES) * blocks_for(CONTEXT + 1)
    layout = config.kv_layout
    return PagedKVCache(layout, [num_blocks], BLOCK_SIZE, dtype, key_panels=key_panels)


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def make_batch(
    num_seqs: int, context: int, new_tokens: int, is_greedy: bool = False
) -> ForwardBatch:
    """Equal sequences of ``context`` tokens, all but the last ``new_tokens`` computed before."""
    sampling = SamplingParams(temperature=0.0 if is_greedy else 1.0)
    token_ids = torch.randint(0, 40_000, (context,)).tolist()
    width = blocks_for(context)
    items = []
    for idx in range(num_seqs):
        blocks = list(range(idx * width, (idx + 1) * width))
        sequence = Sequence(idx, token_ids, context, sampling, block_tables=[blocks])
        sequence.num_computed_tokens = context - new_tokens
        items.append(ScheduledSequence(sequence, new_tokens))
    return build_forward_batch(items, BLOCK_SIZE, CPU, chooses=is_greedy)


def step_rows(library: NativeLibrary, weights: Path, rounds: int) -> list[str]:
    rows = []
    for name, dtype in DTYPES.items():
        reference: Model = load_model(weights, dtype).model
        model = load_model(weights, dtype).model
        assert isinstance(model, Decoder), "the native kernels run no other"
        native = NativeDecoder(model, library)
        cache = make_cache(native.config, dtype)
        rows_cache = make_cache(native.config, dtype, key_panels=False)
        for case, num_seqs, context, new_tokens in step_cases():
            batch = make_batch(num_seqs, context, new_tokens)
            result = compare(
                partial(reference.forward, batch, rows_cache),
                partial(native.forward, batch, cache),
                rounds,
            )
            rows.append(
                f"| {name} | {case} | {result.reference * 1e3:.1f} | {result.native * 1e3:.1f} "
                f"| {result.reference / result.native:.2f} "
                f"| {result.reference_cpu * 1e3:.1f} | {result.native_cpu * 1e3:.1f} "
                f"| {result.reference_cpu / result.native_cpu:.2f} |"
            )
            print(rows[-1], flush=True)
        gc.collect()
    return rows


def step_cases() -> list[tuple[str, int, int, int]]:
    """Name, sequences, context and new tokens of each."""
    cases = [(f"decode, {n} sequences", n, CONTEXT + 1, 1) for n in DECODE_BATCHES]
    return [*cases, (f"prefill {PREFILL}", 1, PREFILL, PREFILL)]


def quantized_rows(library: NativeLibrary, weights: Path, rounds: int) -> list[str]:
    """Native steps with weights of each format, in turns: medians by the clock."""
    dtype = torch.bfloat16
    natives = []
    for name in QUANTIZATIONS:
        model = load_model(weights, dtype, quantization=name).model
        assert isinstance(model, Decoder), "the native kernels run no other"
        natives.append(NativeDecoder(model, library))
    cache = make_cache(natives[0].config, dtype)
    rows = []
    for case, num_seqs, context, new_tokens in step_cases():
        batch = make_batch(num_seqs, context, new_tokens)
        times: list[list[float]] = [[] for _ in natives]
        for idx in range(rounds + 1):
            for native, found in zip(natives, times, strict=True):
                seconds = timed(partial(native.forward, batch, cache))
                if idx:
                    found.append(seconds)
        medians = [statistics.median(found) for found in times]
        cells = [f"{value * 1e3:.1f}" for value in medians]
        cells += [f"{medians[0] / value:.2f}" for value in medians[1:]]
        rows.append(f"| {case} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def limits(rounds: int) -> str:
    """What the machine gives at best just now: reading memory, and multiplying in bf16."""
    buffer = torch.ones(64 * 2**20)  # 256 MiB
    square = torch.randn(1024, 1024).to(torch.bfloat16)
    read = min(timed(buffer.sum) for _ in range(rounds + 3))
    product = min(timed(lambda: square @ square) for _ in range(rounds + 3))
    return (
        f"Memory is read at {buffer.nbytes / read / 1e9:.1f} GB/s (torch's sum of 256 MiB), "
        f"and torch multiplies bf16 matrices of 1024 × 1024 at {2 * 1024**3 / product / 1e9:.0f} "
        f"GFLOP/s: the best of {rounds + 3}."
    )


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=num_usable_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--report", type=Path, default=Path(__file__).parent / "reports" / "kernels.md"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library = load_native(kernels_dir(), print)
    load_before = os.getloadavg()[0]
    sections = [
        "# The CPU kernels against the torch reference",
        "",
        "Made by `python load/kernel_bench.py`. Reference and native take turns in one process, "
        f"medians of {args.rounds} rounds, {args.threads} threads, {library.instructions}, "
        f"torch {torch.__version__}, OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'unset')}.",
        "",
        limits(args.rounds),
        "",
        f"## Steps of {DEFAULT_MODEL}, {CONTEXT} tokens of context",
        "",
        "| dtype | step | reference ms | native ms | ratio | reference CPU ms | native CPU ms "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|",
        *step_rows(library, resolve_weights(DEFAULT_MODEL), args.rounds),
        "",
        "## The same native steps with quantised weights",
        "",
        "| step | bf16 ms | int8 ms | int4 ms | bf16 / int8 | bf16 / int4 |",
        "|---|---|---|---|---|---|",
        *quantized_rows(library, resolve_weights(DEFAULT_MODEL), args.rounds),
        "",
        "## Products on one thread, weights from memory",
        "",
        "| dtype | weight | rows | reference GB/s | native GB/s | reference GFLOP/s "
        "| native GFLOP/s | ratio |",
        "|---|---|---|---|---|---|---|---|",
        *linear_rows(library, args.rounds),
        "",
        f"The machine's load average was {load_before:.1f} at the start and "
        f"{os.getloadavg()[0]:.1f} at the end, on {num_usable_cpus()} cores: above that number, "
        "other processes took their share and the ratios say more than the times.",
    ]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text("\n".join(sections) + "\n", encoding="utf-8")
    print(f"written: {args.report}")


if __name__ == "__main__":
    main()
