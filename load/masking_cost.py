"""What structured output costs a decode step: 32 sequences with 32 schemas, and the same without.

    python -m shoal.load.masking_cost

Two engines of the same model in this process, as a worker has them, take turns of a few steps, so
that both meet the same machine; a turn with masks and the one without beside it are a pair. All
schemas are of lists too long to end, so that every counted step decodes every sequence.
"""

import argparse
import os
import platform
import statistics
import time
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.grammar_gate import GrammarGate
from shoal.backend.messages import AddSequence
from shoal.backend.structured_output import take_grammar
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import DEFAULT_MODEL, resolve_weights
from shoal.scheduler.sampling_params import SamplingParams

REPORT = Path(__file__).parent / "reports" / "masking-cost.md"
NUM_SEQUENCES = 32
WARM_UP_STEPS = 8
TURN_STEPS = 4
MAX_TOKENS = 600
PROMPT = "Write a long list of records about people, places and things as JSON.\n"


def items() -> list[dict[str, Any]]:
    """What the lists hold: objects, strings, numbers and choices of many forms."""
    text = {"type": "string", "maxLength": 24}
    number = {"type": "integer", "minimum": 0, "maximum": 9999}
    kinds: list[dict[str, Any]] = [
        text,
        number,
        {"type": "number"},
        {"type": "boolean"},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,12}( [A-Z][a-z]{1,12})?$"},
        {"type": "string", "format": "date"},
        {"enum": ["red", "green", "blue", "none of these"]},
        {"type": "array", "items": number, "minItems": 1, "maxItems": 4},
        {"anyOf": [text, {"type": "null"}]},
        {"type": "object", "additionalProperties": text, "maxProperties": 3},
    ]
    names = ("name", "city", "age", "kind", "since", "notes", "score", "parts")
    found = []
    for index in range(NUM_SEQUENCES):
        chosen = list(islice(cycle(kinds), index, index + 2 + index % 5))
        properties = {f"{names[i]}_{index}": kind for i, kind in enumerate(chosen)}
        required = list(properties)[: 1 + index % len(properties)]
        found.append({"type": "object", "properties": properties, "required": required})
    return found


def grammar_of(item: dict[str, Any]) -> str:
    """Of a list that max_tokens ends."""
    grammar = take_grammar({"guided_json": {"type": "array", "items": item, "minItems": 500}})
    assert grammar is not None
    return grammar


@dataclass(frozen=True, slots=True)
class Pair:
    """Mean step times of two turns beside each other, in ms."""

    masked: float
    plain: float


class Side:
    """An engine with 32 sequences that never end while they are measured."""

    def __init__(self, config: EngineConfig, prompt: list[int], grammars: list[str | None]) -> None:
        self._engine: GrammarGate = build_engine(config, lambda *_: None)[0]
        for seq_id, grammar in enumerate(grammars):
            sampling = SamplingParams(
                seed=seq_id, max_tokens=MAX_TOKENS, ignore_eos=grammar is None, grammar=grammar
            )
            self._engine.add(AddSequence(seq_id, prompt, len(prompt), sampling))
        while self.step() < NUM_SEQUENCES:
            pass
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> int:
        """How many sequences gained a token."""
        outputs = self._engine.step()
        assert not any(output.error for output in outputs), outputs
        return sum(output.token is not None for output in outputs)

    def turn_ms(self) -> float:
        """Mean time of a step, in which each sequence gained a token."""
        started = time.perf_counter()
        gained = [self.step() for _ in range(TURN_STEPS)]
        took = time.perf_counter() - started
        assert gained == [NUM_SEQUENCES] * TURN_STEPS, gained
        return 1000 * took / TURN_STEPS


def measure(seconds: float, num_threads: int) -> list[Pair]:
    """Pairs, alternating in order, until the time is over or the sequences near their ends."""
    prompt = Tokenizer.from_checkpoint(resolve_weights(DEFAULT_MODEL)).encode(PROMPT)
    config = EngineConfig(
        weights=DEFAULT_MODEL,
        max_num_seqs=NUM_SEQUENCES,
        kv_cache_mib=1024,
        num_threads=num_threads,
    )
    masked = Side(config, prompt, [grammar_of(item) for item in items()])
    plain = Side(config, prompt, [None] * NUM_SEQUENCES)
    ends = time.monotonic() + seconds
    most = (MAX_TOKENS - WARM_UP_STEPS) // TURN_STEPS - NUM_SEQUENCES
    pairs: list[Pair] = []
    for number in count():
        if number == most or time.monotonic() > ends:
            return pairs
        if number % 2:
            after = plain.turn_ms()
            pairs.append(Pair(masked.turn_ms(), after))
        else:
            before = masked.turn_ms()
            pairs.append(Pair(before, plain.turn_ms()))
    raise AssertionError


def report(pairs: list[Pair], num_threads: int) -> str:
    """The figures as Markdown."""
    masked = statistics.median(pair.masked for pair in pairs)
    plain = statistics.median(pair.plain for pair in pairs)
    quiet = len(pairs) // 10  # of turns that nothing disturbed
    quiet_masked = sorted(pair.masked for pair in pairs)[quiet]
    quiet_plain = sorted(pair.plain for pair in pairs)[quiet]
    shares = sorted(100 * (pair.masked / pair.plain - 1) for pair in pairs)
    low, high = shares[len(shares) // 10], shares[-1 - len(shares) // 10]
    return (
        "# What structured output costs a step\n\n"
        f"`python -m shoal.load.masking_cost`: {NUM_SEQUENCES} sequences with {NUM_SEQUENCES} "
        f"schemas, {DEFAULT_MODEL}, temperature 1, decode steps only, {len(pairs)} pairs of "
        f"{TURN_STEPS} steps each, by turns with the same without schemas. "
        f"{num_threads} threads of {platform.machine()}, {os.cpu_count()} CPUs.\n\n"
        "| | step, ms (median) | of the fastest tenth |\n|---|---|---|\n"
        f"| without schemas | {plain:.1f} | {quiet_plain:.1f} |\n"
        f"| with 32 schemas | {masked:.1f} | {quiet_masked:.1f} |\n"
        f"| more | {100 * (masked / plain - 1):.1f} % "
        f"| {100 * (quiet_masked / quiet_plain - 1):.1f} % |\n\n"
        f"Cost of masking: {statistics.median(shares):.1f} % of the step (median of pairs; "
        f"{low:.1f} to {high:.1f} % between the tenths).\n"
    )


def main() -> None:
    """Measure, print, and write the report unless told otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, default=REPORT)
    given = parser.parse_args()
    text = report(measure(given.seconds, given.threads), given.threads)
    given.report.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
