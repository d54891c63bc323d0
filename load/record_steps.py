"""Record a step log of the real engine at many batch shapes, for ``simulate.py fit``.

    python load/record_steps.py steps.jsonl --weights smollm2-135m-instruct --seconds 180

The model runs in this process, without server and worker, so a step is schedule + run + update.
``--cpu-clock`` runs it on one thread and logs CPU time for wall time, which on a machine that has
other work to do is what a step would take without it.
"""

import random
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.grammar_gate import GrammarGate
from shoal.backend.messages import AddSequence
from shoal.scheduler.sampling_params import SamplingParams

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
MAX_OUTPUT_TOKENS = 48


class ShapeFeeder:
    """Keeps the engine at a wanted number of sequences of random lengths."""

    def __init__(
        self, engine: GrammarGate, max_prompt_tokens: int, vocab_size: int, seed: int
    ) -> None:
        self._engine = engine
        self._max_prompt_tokens = max_prompt_tokens
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._next_id = 1
        self._live = 0
        self.cpu_times: list[float] = []  # of this process, at the end of each step

    def run(self, concurrency: int, seconds: float) -> None:
        """Step for some seconds at one concurrency, then let everything finish."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while self._live < concurrency:
                self._add(concurrency)
            self._step()
        while self._engine.has_unfinished:
            self._step()

    def _step(self) -> None:
        self._live -= sum(1 for output in self._engine.step() if output.finish_reason)
        self.cpu_times.append(time.process_time())

    def _add(self, concurrency: int) -> None:
        # Many long prompts at once would only measure prefill; log-uniform keeps most short.
        longest = max(32, self._max_prompt_tokens // max(1, concurrency // 8))
        num_tokens = int(8 * (longest / 8) ** self._random.random())
        prompt = [self._random.randrange(3, self._vocab_size) for _ in range(num_tokens)]
        num_outputs = self._random.randint(4, MAX_OUTPUT_TOKENS)
        sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True, temperature=0.0, seed=0)
        self._engine.add(AddSequence(self._next_id, prompt, num_tokens, sampling))
        self._next_id += 1
        self._live += 1


def main(
    out: Annotated[Path, typer.Argument(help="The step log, a new file.")],
    weights: str = "smollm2-135m-instruct",
    dtype: str = "auto",
    device: str = "auto",
    seconds: Annotated[float, typer.Option(help="Time for all shapes together.")] = 180.0,
    cpu_clock: Annotated[bool, typer.Option(help="Log CPU time, on one thread.")] = False,
    num_threads: Annotated[int | None, typer.Option(help="Of torch; default: all cores.")] = None,
    max_prompt_tokens: int = 1500,
    seed: int = 0,
) -> None:
    """Run the engine at several concurrencies and log each step."""
    if out.exists():
        sys.exit(f"error: {out} exists already.")
    try:
        config = EngineConfig(
            weights,
            dtype=dtype,
            device=device,
            num_threads=1 if cpu_clock else num_threads,
            step_log=str(out),
        )
        engine, ready = build_engine(config, lambda phase, done, total: None)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    longest = min(max_prompt_tokens, ready.max_model_len - MAX_OUTPUT_TOKENS - 1)
    feeder = ShapeFeeder(engine, longest, ready.vocab_size, seed)
    for concurrency in CONCURRENCIES:
        typer.echo(f"{concurrency} sequences at once ({ready.dtype} on {ready.device}) ...")
        feeder.run(concurrency, seconds / len(CONCURRENCIES))
    if cpu_clock:
        replace_times(out, feeder.cpu_times)


def replace_times(log: Path, times: list[float]) -> None:
    """Give each line of a step log, one a step, another time."""
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    for line, step_time in zip(lines, times, strict=True):
        line["time"] = step_time
    log.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


if __name__ == "__main__":
    typer.run(main)
