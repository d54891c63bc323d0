"""The engine alone against the machine's limits, and what the path to it takes.

    python -m shoal.load.engine_roofline [--rounds 3] [--bits bf16] [--report FILE]

The same closed loop, 128 tokens in and 128 out, in turns: the engine in a process of its own that
only steps it, and the whole server (Triton, stub, worker, OpenAI endpoint) with a client.
"""

import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.load.compare.contenders import BITS, OURS, MissingError, checkpoint
from shoal.load.compare.in_process import GLANCE_EVERY_S, EngineLoop
from shoal.load.compare.records import Journal, Measured, Skipped
from shoal.load.compare.report import TITLES
from shoal.load.compare.roofline import ModelShape, Peaks, best_tokens_per_s
from shoal.load.compare.rounds import Comparison, cases_for, output_of
from shoal.load.compare.servers import leave_on_sigterm
from shoal.load.compare.summary import Spread
from shoal.load.report import markdown_table
from shoal.load.scheduler_cost import cpu_name

LENGTHS = (128, 128)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """A closed loop of the engine alone, each step against the limits around it."""

    streams: int
    tokens_per_s: float
    roofline: float  # tokens a second, had each of its steps taken the least it can
    best: float  # tokens a second of the best order of the same work
    decode_ms: float  # median of steps that only decode, with the most streams that ever do
    decode_roofline: float  # share
    limits: Peaks  # means over the time of the steps

    @classmethod
    def of(cls, loop: EngineLoop, shape: ModelShape, bits: str) -> "EngineFigures":
        """Figures of what ran. Steps with no token of a prompt count as decodes."""
        least = [shape.step_seconds(step.runs, bits, step.limits) for step in loop.steps]
        limits = Peaks(
            sum(step.limits.read * step.seconds for step in loop.steps) / loop.seconds,
            sum(step.limits.product * step.seconds for step in loop.steps) / loop.seconds,
        )
        decodes = [
            (len(step.runs), step.seconds, seconds)
            for step, seconds in zip(loop.steps, least, strict=True)
            if all(run.num_tokens == 1 for run in step.runs)
        ]
        # Prompts that come in one after another may leave no step to all streams alone.
        most = max((num_seqs for num_seqs, _, _ in decodes), default=0)
        full = [(took, best) for num_seqs, took, best in decodes if num_seqs == most]
        return cls(
            streams=loop.streams,
            tokens_per_s=loop.tokens / loop.seconds,
            roofline=loop.tokens / sum(least),
            best=best_tokens_per_s(shape, bits, limits, loop.streams, LENGTHS),
            decode_ms=1000 * statistics.median(seconds for seconds, _ in full),
            decode_roofline=sum(best for _, best in full) / sum(took for took, _ in full),
            limits=limits,
        )


def main(
    model: str = "smollm2",
    bits: str = "bf16",
    rounds: int = 3,
    streams: str = "1,8,32",
    folder: Annotated[
        Path, typer.Option(envvar="SHOAL_PEERS", help="Where the checkpoint is.")
    ] = Path("~/peers"),
    port: Annotated[int, typer.Option(help="Of the server, and the three after it.")] = 19150,
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Measure, print, and write a report if asked."""
    if bits not in BITS:
        sys.exit(f"error: --bits has {bits!r}; allowed: {', '.join(BITS)}.")
    leave_on_sigterm()
    where = folder.expanduser().absolute()
    try:
        weights = checkpoint(where, model)
    except MissingError as error:
        sys.exit(f"error: {error}.")
    shape = ModelShape.of_checkpoint(weights)
    cases = cases_for([int(part) for part in streams.split(",")], None, repeat=False)
    journal = Journal(None)
    comparison = Comparison(journal, where, port)
    engine: list[EngineFigures] = []
    load = os.getloadavg()[0]
    for number in range(1, rounds + 1):
        comparison.run(model, (bits,), (), cases, number)
        loads = ",".join(f"{case.streams}:{case.requests}" for case in cases)
        command = ["-m", "shoal.load.compare.in_process", str(weights), bits, loads]
        output = output_of([sys.executable, *command], {"OMP_WAIT_POLICY": "PASSIVE"})
        for loop in msgspec.json.decode(output, type=list[EngineLoop]):
            engine.append(EngineFigures.of(loop, shape, bits))
            print(f"  in process, {loop.streams} streams: {engine[-1].tokens_per_s:.1f} tokens/s")
    if skipped := [record for record in journal.records if isinstance(record, Skipped)]:
        sys.exit(f"error: {skipped[0].reason}")
    served = [record for record in journal.records if isinstance(record, Measured)]
    lines = [
        *_head(rounds, model, bits, load),
        *markdown_table(_HEADER, [_row(case.streams, engine, served) for case in cases]),
    ]
    print("\n".join(lines))
    if report is not None:
        report.write_text("\n".join(lines) + "\n", encoding="utf-8")


_HEADER = (
    "streams",
    "in process, tokens/s",
    "of the roofline",
    "of the best order",
    "memory, GB/s",
    "products, G/s",
    "decode step, ms",
    "of its roofline",
    "served, tokens/s",
    "the path takes",
)


def _row(streams: int, engine: list[EngineFigures], served: list[Measured]) -> tuple[str, ...]:
    alone = [figures for figures in engine if figures.streams == streams]
    through = [
        record.result.tokens_per_s
        for record in served
        if record.name == OURS and record.result.streams == streams
    ]
    inside = Spread.of(figures.tokens_per_s for figures in alone)
    outside = Spread.of(through)
    return (
        str(streams),
        _text(inside, "{:.1f}"),
        _text(Spread.of(f.tokens_per_s / f.roofline for f in alone), "{:.0%}"),
        _text(Spread.of(f.tokens_per_s / f.best for f in alone), "{:.0%}"),
        _text(Spread.of(f.limits.read / 1e9 for f in alone), "{:.1f}"),
        _text(Spread.of(f.limits.product / 1e9 for f in alone), "{:.0f}"),
        _text(Spread.of(f.decode_ms for f in alone), "{:.2f}"),
        _text(Spread.of(f.decode_roofline for f in alone), "{:.0%}"),
        _text(outside, "{:.1f}"),
        f"{1 - outside.median / inside.median:.0%}",
    )


def _text(spread: Spread, form: str) -> str:
    return f"{form.format(spread.median)} ({form.format(spread.low)}–{form.format(spread.high)})"


def _head(rounds: int, model: str, bits: str, load: float) -> list[str]:
    return [
        "# The engine against the machine's limits",
        "",
        "`python -m shoal.load.engine_roofline --report FILE` makes this page. "
        f"{TITLES.get(model, model)}, {bits}, 128 tokens in, 128 out, greedy, a closed loop; "
        f"medians and ranges of {rounds} rounds in which the engine alone and the whole server "
        f"take turns. {cpu_name()}; the load average was {load:.1f} at the start.",
        "",
        f"Limits: reading memory and multiplying matrices of {bits}, by torch on all cores, looked "
        f"at between the engine's steps every {GLANCE_EVERY_S:g} s, as they change within seconds "
        "where cores are virtual. Of the looks before and after a step the higher counts, of each "
        "limit; the table has the means over a run.",
        "",
        "The roofline of a step is max(bytes / memory read, operations / product): each weight "
        "once, keys and values read and written; two operations for each weight and token, four "
        "for each element of a query and key pair. That of a run is the sum over the steps as "
        "they were composed; the best order has all prompts in one step and then one step a "
        "token. The fraction is the roofline's time by the time that the steps took, from one "
        "step's end to the next one's, scheduling and sampling in it; each step's against "
        "its own limits. A decode step has one token of every stream, or of as many as ever decode "
        "alone, and nothing else. What the path takes is 1 − served / in process.",
        "",
    ]


if __name__ == "__main__":
    typer.run(main)
