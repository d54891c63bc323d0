"""The engine in this process, without Triton, stub and shim: the closed loop of the comparison.

    OMP_WAIT_POLICY=PASSIVE python -m shoal.load.compare.in_process CHECKPOINT BITS 1:4,8:16,32:64

For each ``streams:requests``; prints one JSON list. A request that ends is replaced before the next
step, so the engine always has ``streams`` sequences until none is left to begin. Every quarter of a
second the engine waits while the machine's limits are looked at.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.grammar_gate import GrammarGate
from shoal.backend.messages import AddSequence
from shoal.backend.step_log import StepRecord
from shoal.load.compare.limits import Glances
from shoal.load.compare.prompts import RandomWords
from shoal.load.compare.roofline import Peaks, Run
from shoal.scheduler.sampling_params import SamplingParams

LENGTHS = (128, 128)  # tokens of prompt and answer
WARM_UP = 8
GLANCE_EVERY_S = 0.25


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step: how long until the next could begin, what it ran, and the machine's limits then."""

    seconds: float
    runs: list[Run]
    limits: Peaks


class EngineLoop(msgspec.Struct, frozen=True):
    """A closed loop of so many streams."""

    streams: int
    tokens: int  # of the answers
    steps: list[Step]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)


class EngineClient:
    """Feeds an engine; ``log`` is the step log that it writes."""

    def __init__(self, engine: GrammarGate, log: Path, glances: Glances) -> None:
        self._engine = engine
        self._glances = glances
        self._log = log.open("rb")
        self._decoder = msgspec.json.Decoder(StepRecord)
        self._next_id = 1

    def run(self, prompts: Sequence[list[int]], streams: int, num_outputs: int) -> EngineLoop:
        """All prompts, ``streams`` at a time."""
        waiting = iter(prompts)
        seconds: list[float] = []
        limits: list[Peaks] = []  # of each step
        glance = self._glances.take()
        live = self._add(waiting, streams, num_outputs)
        began = first = time.perf_counter()
        while live:
            outputs = self._engine.step()
            ended = sum(output.finish_reason is not None for output in outputs)
            live += self._add(waiting, ended, num_outputs) - ended
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
            if now - first > GLANCE_EVERY_S or not live:
                earlier, glance = glance, self._glances.take()
                limits += [higher(earlier, glance)] * (len(seconds) - len(limits))
                began = first = time.perf_counter()
        steps = [
            Step(spent, [Run(s.num_tokens, s.num_computed, s.samples) for s in record.seqs], limit)
            for spent, record, limit in zip(seconds, self._take_log(), limits, strict=True)
        ]
        return EngineLoop(streams, len(prompts) * num_outputs, steps)

    def _add(self, waiting: Iterator[list[int]], count: int, num_outputs: int) -> int:
        """Begin at most ``count`` of them; how many that were."""
        sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True, temperature=0.0, seed=0)
        prompts = [prompt for _, prompt in zip(range(count), waiting, strict=False)]
        for prompt in prompts:
            self._engine.add(AddSequence(self._next_id, prompt, len(prompt), sampling))
            self._next_id += 1
        return len(prompts)

    def _take_log(self) -> list[StepRecord]:
        """What the log has since the last time."""
        return [self._decoder.decode(line) for line in self._log]


def higher(one: Peaks, other: Peaks) -> Peaks:
    """Of each limit the higher, as a busy moment can only lower one."""
    return Peaks(max(one.read, other.read), max(one.product, other.product))


def measure(weights: Path, bits: str, loads: Sequence[tuple[int, int]]) -> list[EngineLoop]:
    """``loads``: streams and requests of each closed loop."""
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as folder:
        log = Path(folder) / "steps.jsonl"
        config = EngineConfig(
            str(weights),
            dtype="bfloat16",
            quantization="none" if bits == "bf16" else bits,
            step_log=str(log),
        )
        engine, _ = build_engine(config, lambda phase, done, total: None)
        client = EngineClient(engine, log, Glances(bits))
        results = []
        for streams, requests in loads:
            words = RandomWords(weights, streams)
            prompts = [words.token_ids(LENGTHS[0]) for _ in range(requests)]
            client.run([words.token_ids(LENGTHS[0]) for _ in range(WARM_UP)], WARM_UP, 16)
            results.append(client.run(prompts, streams, LENGTHS[1]))
        return results


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(f"usage: {Path(__file__).name} CHECKPOINT BITS STREAMS:REQUESTS,...")
    loads = [tuple(map(int, part.split(":"))) for part in sys.argv[3].split(",")]
    results = measure(Path(sys.argv[1]), sys.argv[2], [(one, many) for one, many in loads])
    print(msgspec.json.encode(results).decode())


if __name__ == "__main__":
    main()
