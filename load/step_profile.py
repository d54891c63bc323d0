"""Where a step's time goes: each kind of operation against this machine's limits.

    OMP_WAIT_POLICY=PASSIVE python load/step_profile.py [--decode 1,8,32] [--report FILE]

Runs the planned forward pass of a bf16 model with a clock between its operations. Decode steps
have one token of each sequence, prefill steps one chunk without a context before it. An operation's
bound is what its bytes or its products take at the measured limits, whichever is more; products
with weights of 8 and 4 bits may do twice what bf16's do, as their instruction does.
"""

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.machine import num_usable_cpus
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.catalogue import DEFAULT_MODEL, kernels_dir, resolve_weights
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import load_native
from shoal.kernels.native_plan import OpKind, OpTime
from shoal.load.kernel_bench import BLOCK_SIZE, blocks_for, make_batch, timed

BITS = {"none": 16, "int8": 8, "int4": 4}  # of a weight, without its scales
PRODUCTS = (OpKind.LINEAR, OpKind.LOGITS, OpKind.EXPERT_LINEAR, OpKind.SCREEN)
SAMPLED = (OpKind.LOGITS, OpKind.SCREEN)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine gives at best, with weights of so many bits."""

    bytes_per_s: float
    flops_per_s: float  # in bf16
    weight_bits: int = 16

    @classmethod
    def measure(cls, weight_bits: int, rounds: int = 6) -> "Limits":
        buffer = torch.ones(64 * 2**20)  # 256 MiB
        square = torch.randn(1024, 1024).to(torch.bfloat16)
        read = min(timed(buffer.sum) for _ in range(rounds))
        product = min(timed(lambda: square @ square) for _ in range(rounds))
        return cls(buffer.nbytes / read, 2 * 1024**3 / product, weight_bits)

    def bits_of(self, kind: OpKind) -> int:
        """Of a weight of such a product: what screens the logits has 8."""
        return 8 if kind is OpKind.SCREEN else self.weight_bits

    def seconds(self, kind: OpKind, num_bytes: float, num_flops: float) -> float:
        flops_per_s = self.flops_per_s
        if kind in PRODUCTS and self.bits_of(kind) < 16:
            flops_per_s *= 2
        return max(num_bytes / self.bytes_per_s, num_flops / flops_per_s)


@dataclass(frozen=True, slots=True)
class Case:
    """Equal sequences of ``context`` tokens, of which the last ``new_tokens`` are computed."""

    num_seqs: int
    context: int
    new_tokens: int

    @property
    def name(self) -> str:
        if self.new_tokens == 1:
            return f"decode, {self.num_seqs} sequences of {self.context} tokens"
        return f"prefill of {self.new_tokens} tokens"

    def rows_of(self, kind: OpKind) -> int:
        return self.num_seqs * (1 if kind in SAMPLED else self.new_tokens)


def profile_rows(model: NativeDecoder, case: Case, rounds: int, limits: Limits) -> list[str]:
    """A Markdown table of a greedy step: the median round's total, means by kind of operation."""
    num_blocks = case.num_seqs * blocks_for(case.context)
    cache = PagedKVCache(
        model.config.kv_layout, [num_blocks], BLOCK_SIZE, torch.bfloat16, key_panels=True
    )
    batch = make_batch(case.num_seqs, case.context, case.new_tokens, is_greedy=True)
    spent = model.forward(batch, cache)  # steps write their logits where the last one's were
    forward = partial(model.forward, replace(batch, spent_logits=spent), cache)
    whole = []
    model.plan.start_timing()
    for _ in range(rounds):
        start = time.perf_counter()
        forward()
        whole.append(time.perf_counter() - start)
    rows = [
        f"## {case.name}: {statistics.median(whole) * 1e3:.2f} ms",
        "",
        "| operation | calls | ms | share | GB/s | GFLOP/s | of its bound |",
        "|---|---|---|---|---|---|---|",
    ]
    total = sum(whole) / rounds
    times = model.plan.op_times()
    if model.plan.screens:
        times = [op for op in times if op.kind is not OpKind.LOGITS]
    for name, ops in by_name(times).items():
        seconds = sum(op.seconds for op in ops) / rounds
        row = f"| {name} | {len(ops)} | {seconds * 1e3:.2f} | {seconds / total:.0%} "
        num_bytes, num_flops = work(model, case, ops, limits)
        if num_bytes:
            row += f"| {num_bytes / seconds / 1e9:.1f} | {num_flops / seconds / 1e9:.0f} "
            row += f"| {limits.seconds(ops[0].kind, num_bytes, num_flops) / seconds:.0%} |"
        else:
            row += "| | | |"
        rows.append(row)
    bound = sum(limits.seconds(op.kind, *work(model, case, [op], limits)) for op in times)
    rows += ["", f"All bounds together are {bound * 1e3:.2f} ms: {bound / total:.0%}.", ""]
    return rows


def by_name(ops: list[OpTime]) -> dict[str, list[OpTime]]:
    """Operations that do the same; the longest kinds first."""
    found: dict[str, list[OpTime]] = defaultdict(list)
    for op in ops:
        shape = f" {op.n} × {op.k}" if op.kind in PRODUCTS else ""
        found[op.kind.name.lower().replace("_", " ") + shape].append(op)
    return dict(sorted(found.items(), key=lambda item: -sum(op.seconds for op in item[1])))


def work(
    model: NativeDecoder, case: Case, ops: list[OpTime], limits: Limits
) -> tuple[float, float]:
    """Bytes that these operations read from memory, and what they multiply and add."""
    num_bytes = num_flops = 0.0
    layers = model.config.kv_layout.layers
    for op in ops:
        if op.kind in PRODUCTS:
            num_bytes += limits.bits_of(op.kind) / 8 * op.n * op.k
            num_flops += 2 * op.n * op.k * case.rows_of(op.kind)
        elif op.kind is OpKind.ATTENTION:
            heads = layers[0]
            pairs = case.new_tokens * (case.context - (case.new_tokens - 1) / 2)
            num_bytes += 4 * case.num_seqs * case.context * heads.num_kv_heads * heads.head_dim
            num_flops += 4 * case.num_seqs * pairs * model.config.num_heads * heads.head_dim
    return num_bytes, num_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=num_usable_cpus())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--decode", default="1,8,32,64", help="sequences of each decode step")
    parser.add_argument("--prefill", default="128,512", help="tokens of each prefill step")
    parser.add_argument("--quantization", choices=list(BITS), default="none")
    parser.add_argument("--context", type=int, default=193)
    parser.add_argument("--report", type=Path, help="where to write; else it is only printed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library = load_native(kernels_dir(), print)
    weights = resolve_weights(args.model)
    source = load_model(weights, torch.bfloat16, quantization=args.quantization).model
    assert isinstance(source, Decoder), "the other native models are timed by their whole steps"
    model = NativeDecoder(source, library)
    limits = Limits.measure(BITS[args.quantization])
    cases = [Case(int(n), args.context, 1) for n in args.decode.split(",") if n]
    cases += [Case(1, int(n), int(n)) for n in args.prefill.split(",") if n]
    precision = "bf16" if args.quantization == "none" else args.quantization
    text = "\n".join(
        [
            f"# Where a step's time goes: {args.model}, {precision}, {args.threads} threads",
            "",
            "Made by `python load/step_profile.py`. An operation's bound is what its bytes take at "
            f"{limits.bytes_per_s / 1e9:.1f} GB/s or its products at "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s, whichever is more. Steps are greedy: where "
            "a copy of the output projection in 8 bits screens it, not all logits are computed.",
            "",
            *(row for case in cases for row in profile_rows(model, case, args.rounds, limits)),
        ]
    )
    print(text)
    if args.report:
        args.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
