"""What forgetting costs: long sessions under a KV budget against the whole cache.

    python -m shoal.load.session_eviction [--report load/reports/session-eviction.md]

Each session reads a text through the real scheduler and kernels and then goes on with it. Reading
is scored token by token; the positions of evictions follow from the budget alone, so a prompt that
comes in chunks is scored as one that comes token by token.
"""

import math
import statistics
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.public_texts import read_text, text_names
from shoal.load.scored_session import (
    BLOCK_SIZE,
    LoadedSessions,
    MakeEviction,
    SessionRun,
    load,
    run_session,
)
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.session_eviction import (
    ATTENTION_SINK,
    H2O,
    SessionEviction,
    SinkPolicy,
    make_session_eviction,
)

REPORT = Path(__file__).parent / "reports" / "session-eviction.md"
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "ignore_eos": True}
FULL, WINDOW = "lru", "window"
SHOWN_CHARACTERS = 420


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one text."""

    policy: str
    run: SessionRun

    def perplexity(self, start: int) -> float:
        """Of the prompt's tokens from position ``start`` on."""
        return math.exp(statistics.fmean(self.run.nll[start:]))

    @property
    def most_held(self) -> int:
        return max(held for _, held in self.run.held)

    def held_at(self, position: int) -> int:
        """Blocks held when so many tokens were computed."""
        return next(held for computed, held in self.run.held if computed >= position)

    def worse_than(self, other: "Row", start: int) -> tuple[float, float]:
        """Mean difference of the tokens' log-probabilities, in percent of perplexity, and its
        standard error: the same tokens, so in pairs."""
        pairs = zip(self.run.nll[start:], other.run.nll[start:], strict=True)
        differences = [mine - theirs for mine, theirs in pairs]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return 100 * math.expm1(statistics.fmean(differences)), 100 * error


def main(
    weights: str = "smollm2-135m-instruct",
    dtype: str = "auto",
    budget: int = 1024,
    length: Annotated[int, typer.Option(help="Tokens of a session, outputs included.")] = 8192,
    outputs: int = 300,
    report: Annotated[Path, typer.Option(help="Write Markdown there.")] = REPORT,
) -> None:
    """Run every policy on every text, print and write what came of it."""
    loaded = load(weights, dtype)
    rows = {}
    for name in text_names():
        prompt = loaded.tokenizer.encode(read_text(name))[: length - outputs]
        rows[name] = [
            _run(loaded, prompt, policy, make, length, outputs)
            for policy, make in policies(budget).items()
        ]
        print("\n".join(_perplexity_table(name, rows[name], budget)), flush=True)
    text = "\n".join(_report(loaded, rows, weights, budget, length, outputs))
    report.write_text(f"{text}\n")
    print(f"wrote {report}")


def policies(budget: int) -> dict[str, MakeEviction]:
    """By name, how a session of that policy starts. ``window`` is a foil that no request can have:
    as ``attention_sink``, without the sink."""

    def sink() -> SessionEviction:
        return make_session_eviction(ATTENTION_SINK, budget, BLOCK_SIZE)

    def window() -> SessionEviction:
        like = sink()
        return SessionEviction(SinkPolicy(0), like.num_blocks, like.num_dropped, BLOCK_SIZE)

    return {
        FULL: lambda: None,
        WINDOW: window,
        ATTENTION_SINK: sink,
        H2O: lambda: make_session_eviction(H2O, budget, BLOCK_SIZE),
    }


def _run(
    loaded: LoadedSessions,
    prompt: list[int],
    policy: str,
    make: MakeEviction,
    length: int,
    outputs: int,
) -> Row:
    sampling = SamplingParams.from_dict({**SAMPLING, "max_tokens": outputs})
    return Row(policy, run_session(loaded, prompt, make, max_len=length + 1, sampling=sampling))


def _report(
    loaded: LoadedSessions,
    rows: dict[str, list[Row]],
    weights: str,
    budget: int,
    length: int,
    outputs: int,
) -> list[str]:
    num_blocks = -(-budget // BLOCK_SIZE)
    lines = [
        "# Sessions under a KV budget",
        "",
        "`python -m shoal.load.session_eviction` makes this page.",
        "",
        f"{weights}, {str(loaded.dtype).removeprefix('torch.')}, {loaded.kernels} kernels; "
        f"sessions of {length:,} tokens (a text of {length - outputs:,}, then {outputs} sampled "
        f"ones) with a budget of {budget:,} tokens: {num_blocks} blocks of {BLOCK_SIZE}. One of "
        f"1,024 *blocks* would be {1024 * BLOCK_SIZE:,} tokens, beyond this model's context: "
        "nothing would ever be dropped, and the text is that of `lru`, token for token.",
        "",
        "The texts come through the real scheduler, block pool and kernels, as a prompt does. "
        "Evictions happen at positions that follow from the budget alone, so the scores are those "
        "of a session that grows token by token, bit for bit with the native kernels.",
        "",
        "`window` is a foil: `attention_sink` without the sink. No request can have it.",
        "",
        "## Perplexity",
        "",
        f"Of the tokens from position {budget:,} on. The last columns compare token by token: mean "
        "and standard error, in percent of perplexity.",
    ]
    for name, measured in rows.items():
        lines += ["", *_perplexity_table(name, measured, budget)]
    lines += ["", "## Memory", "", "Blocks held when so many tokens were computed.", ""]
    lines += _memory_table(next(iter(rows.values())), budget, length)
    lines += ["", "## Text", ""]
    sampling = ", ".join(f"{name} {value}" for name, value in SAMPLING.items())
    lines += [f"How the sessions go on ({sampling}); its beginning."]
    for name, measured in rows.items():
        lines += ["", f"### After {name}"]
        for row in measured:
            shown = " ".join(loaded.tokenizer.decode(row.run.output)[:SHOWN_CHARACTERS].split())
            lines += ["", f"**{row.policy}**: {shown} …"]
    return lines


def _perplexity_table(name: str, rows: SequenceOf[Row], start: int) -> list[str]:
    by_policy = {row.policy: row for row in rows}
    lines = [
        f"| {name} | perplexity | against `lru` | against `attention_sink` | blocks, most | s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        against = [
            "" if row is other else "{:+.2f} ± {:.2f} %".format(*row.worse_than(other, start))
            for other in (by_policy[FULL], by_policy[ATTENTION_SINK])
        ]
        lines.append(
            f"| `{row.policy}` | {row.perplexity(start):.3f} | {' | '.join(against)} "
            f"| {row.most_held} | {row.run.seconds:.0f} |"
        )
    return lines


def _memory_table(rows: SequenceOf[Row], budget: int, length: int) -> list[str]:
    positions = [budget // 2, budget, *range(2 * budget, length, budget), length - 1]
    lines = [
        f"| tokens | {' | '.join(f'{position:,}' for position in positions)} |",
        "|---" * (len(positions) + 1) + "|",
    ]
    for row in rows:
        held = " | ".join(str(row.held_at(position)) for position in positions)
        lines.append(f"| `{row.policy}` | {held} |")
    return lines


if __name__ == "__main__":
    typer.run(main)
