"""What the tiers below the KV cache give: time to first token by where a prompt's blocks lie, and
work for four times as many sequences as the cache holds.

    python load/kv_tiers.py [--report load/reports/kv-tiers.md]

It runs the engine itself, without a server, so that nothing but the tiers is measured.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.messages import AddSequence, MemoryStatus
from shoal.scheduler.sampling_params import SamplingParams

VOCAB = range(1000, 40_000)
BLOCK_SIZE = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 40
TIERS = ("computed", "device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request: seconds to its first token, tokens found in a cache, and the text."""

    ttft_s: float
    num_cached: int
    token_ids: tuple[int, ...]


class Bench:
    """An engine, and requests to it."""

    def __init__(self, **settings: Any) -> None:
        config = EngineConfig(block_size=BLOCK_SIZE, **settings)
        self._engine, _ = build_engine(config, lambda phase, done, total: None)
        self._num_requests = 0

    @property
    def memory(self) -> MemoryStatus:
        return self._engine.status.memory

    @property
    def num_preemptions(self) -> int:
        return self._engine.status.num_preemptions

    def ask(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
        """All at once, to their ends."""
        sampling = SamplingParams(temperature=1.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        first_id = self._num_requests
        for prompt in prompts:
            message = AddSequence(self._num_requests, prompt, len(prompt), sampling)
            self._engine.add(message)
            self._num_requests += 1
        ttft: dict[int, float] = {}
        cached: dict[int, int] = {}
        texts: dict[int, list[int]] = {first_id + i: [] for i in range(len(prompts))}
        while self._engine.has_unfinished:
            for output in self._engine.step():
                if output.error is not None or output.token is None:
                    raise RuntimeError(f"a request failed: {output.error}")
                ttft.setdefault(output.seq_id, time.perf_counter() - start)
                cached[output.seq_id] = output.num_cached_tokens
                texts[output.seq_id].append(output.token.token_id)
        return [Answer(ttft[i], cached[i], tuple(texts[i])) for i in texts]


def time_to_first_token(weights: str, prompt_tokens: int, rounds: int, folder: Path) -> list[str]:
    """Rows of a table. Each round sends one prompt down tier by tier, and checks that it did."""
    num_blocks = -(-prompt_tokens // BLOCK_SIZE)
    bench = Bench(
        weights=weights,
        num_kv_blocks=num_blocks * 5 // 4,
        host_kv_mib=64,
        kv_disk_dir=str(folder / "kv"),
        max_model_len=prompt_tokens + 8,
    )
    draw = random.Random(0)
    seconds: dict[str, list[float]] = {tier: [] for tier in TIERS}
    num_host = bench.memory.host_blocks_total
    num_to_disk = 2 + num_host // num_blocks  # so many other prompts push one out of the host
    for _ in range(rounds):
        prompt = draw.choices(VOCAB, k=prompt_tokens)
        others = {"computed": 0, "device": 0, "host": 1, "disk": num_to_disk}
        for tier in TIERS:
            for _ in range(others[tier]):
                bench.ask([draw.choices(VOCAB, k=prompt_tokens)], 1)
                time.sleep(0.2)  # the disk's thread writes
            before = bench.memory.num_promoted_blocks
            (answer,) = bench.ask([prompt], 1)
            came_back = bench.memory.num_promoted_blocks - before
            if (answer.num_cached > 0, came_back > 0) != _expected(tier):
                print(f"{tier}: {answer.num_cached} cached, {came_back} blocks back: left out")
                continue
            seconds[tier].append(answer.ttft_s)
    return [
        f"| {tier} | {1000 * median(times):.1f} | {1000 * min(times):.1f} to "
        f"{1000 * max(times):.1f} | {median(seconds['computed']) / median(times):.1f} |"
        for tier, times in seconds.items()
    ]


def _expected(tier: str) -> tuple[bool, bool]:
    """Whether it has cached tokens, and blocks that came back."""
    return tier != "computed", tier in ("host", "disk")


def four_times_too_many(weights: str, num_fit: int) -> list[str]:
    """Rows of a table: ways to serve sequences where a quarter of them fit."""
    num_requests = 4 * num_fit
    draw = random.Random(1)
    prompts = [draw.choices(VOCAB, k=PROMPT_TOKENS) for _ in range(num_requests)]
    longest = PROMPT_TOKENS + OUTPUT_TOKENS
    few = num_fit * -(-longest // BLOCK_SIZE)
    modes: dict[str, dict[str, Any]] = {
        "room for all": {"num_kv_blocks": 4 * few, "prefix_caching": False},
        "recompute": {"num_kv_blocks": few, "prefix_caching": False},
        "checkpoints on the host": {
            "num_kv_blocks": few,
            "prefix_caching": False,
            "host_kv_mib": 256,
        },
        "prefix tree and host": {"num_kv_blocks": few, "host_kv_mib": 256},
    }
    alone = Bench(weights=weights, dtype="float32", num_kv_blocks=few, prefix_caching=False)
    expected = [alone.ask([prompt], OUTPUT_TOKENS)[0].token_ids for prompt in prompts]
    rows = []
    for name, settings in modes.items():
        bench = Bench(
            weights=weights,
            dtype="float32",
            max_model_len=longest + 8,
            max_num_seqs=num_requests,
            **settings,
        )
        start = time.perf_counter()
        answers = bench.ask(prompts, OUTPUT_TOKENS)
        elapsed = time.perf_counter() - start
        num_equal = sum(a.token_ids == text for a, text in zip(answers, expected, strict=True))
        memory = bench.memory
        rows.append(
            f"| {name} | {elapsed:.1f} | {bench.num_preemptions} | {memory.num_restores} | "
            f"{memory.num_promoted_blocks} | {num_equal} of {num_requests} |"
        )
    return rows


def main(
    weights: str = "smollm2-135m-instruct",
    prompt_tokens: int = 1000,
    rounds: int = 5,
    num_fit: Annotated[int, typer.Option(help="Sequences that the KV cache holds.")] = 10,
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Print two tables; with --report also write them."""
    with tempfile.TemporaryDirectory() as folder:
        first = time_to_first_token(weights, prompt_tokens, rounds, Path(folder))
    second = four_times_too_many(weights, num_fit)
    lines = [
        f"A prompt of {prompt_tokens} random tokens, asked again after others have pushed its "
        f"blocks down to the tier; {rounds} rounds.",
        "",
        "| its blocks are | median TTFT, ms | range, ms | computed over it |",
        "|---|---|---|---|",
        *first,
        "",
        f"{4 * num_fit} requests at once, of {PROMPT_TOKENS} random tokens and {OUTPUT_TOKENS} "
        f"more, in float32, where the KV cache holds {num_fit} at their longest. Texts are "
        "compared with those of each request alone.",
        "",
        "| | seconds | preemptions | checkpoints restored | prefix blocks restored | same text |",
        "|---|---|---|---|---|---|",
        *second,
    ]
    text = "\n".join(lines)
    print(text)
    if report is not None:
        head = "# KV tiers\n\n`python load/kv_tiers.py` makes this page."
        report.write_text(f"{head}\n\n{text}\n")


if __name__ == "__main__":
    typer.run(main)
