"""A long prompt arrives among streams that decode: how long their tokens stay away.

    python -m shoal.load.newcomer_gap --report load/reports/newcomer-gap.md

Starts a server of its own. Sixteen streams decode through the OpenAI endpoint; then a prompt of
2,048 tokens comes. A gap is the time between two events of a stream.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from shoal.load.live_client import LiveClient, LiveRecord, LiveRequest
from shoal.load.live_server import MODEL, live_server, wait_idle
from shoal.load.report import markdown_table
from shoal.load.scheduler_cost import cpu_name

NUM_STREAMS = 16
# Every token of the answer to this has text, and so an event: none is an end mark, which has none.
STREAM_TEXT = "0. " + "Once upon a time, in a village by the sea, there lived a fisherman. " * 6
NUM_NEWCOMER_TOKENS = 2048
NUM_NEWCOMER_OUTPUTS = 8
EVENTS_BEFORE = 60  # that each stream has when the long prompt comes
LIMIT = 3.0


@dataclass(frozen=True, slots=True)
class Round:
    """Gaps in seconds, of all streams together."""

    gaps: list[float]
    before: list[float]  # those that ended before the newcomer was sent
    beside: list[float]  # those that ended between then and its first token
    newcomer_ttft: float

    @classmethod
    def of(cls, records: Sequence[LiveRecord]) -> "Round":
        *streams, newcomer = records
        sent, first = newcomer.sent, newcomer.first_token
        if first is None or not all(record.is_finished for record in streams):
            raise RuntimeError("a request did not finish; take more --outputs, or look at the log.")
        if min(record.token_times[-1] for record in streams) < first:
            raise RuntimeError("a stream was over before the newcomer's first token.")
        decoding = max(record.token_times[0] for record in streams)  # all of them, from here on
        pairs = [
            (end, end - start)
            for record in streams
            for start, end in zip(record.token_times, record.token_times[1:], strict=False)
            if start > decoding
        ]
        return cls(
            [gap for _, gap in pairs],
            [gap for end, gap in pairs if end < sent],
            [gap for end, gap in pairs if sent <= end <= first],
            first - sent,
        )

    @property
    def worst(self) -> float:
        return max(self.gaps)


async def _one_round(client: LiveClient, num_outputs: int) -> Round:
    client.restart()
    streams = [
        client.begin(LiveRequest(0.0, 0, num_outputs, text=STREAM_TEXT)) for _ in range(NUM_STREAMS)
    ]
    while any(len(r.token_times) < EVENTS_BEFORE and not task.done() for r, task in streams):
        await asyncio.sleep(0.01)
    newcomer = client.begin(LiveRequest(0.0, NUM_NEWCOMER_TOKENS, NUM_NEWCOMER_OUTPUTS))
    await asyncio.gather(*(task for _, task in (*streams, newcomer)))
    return Round.of([record for record, _ in (*streams, newcomer)])


def main(
    port: Annotated[int, typer.Option(help="Of the server, and the three after it.")] = 19130,
    rounds: int = 3,
    outputs: Annotated[int, typer.Option(help="Tokens of each stream.")] = 320,
    decode_stretch: float = 1.8,
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Measure, print, and write a report if asked."""
    try:
        with live_server(port, decode_stretch=decode_stretch, prefix_caching=False) as open_port:
            client = LiveClient(open_port, MODEL)
            asyncio.run(_one_round(client, outputs))  # warm up
            measured = []
            for _ in range(rounds):
                wait_idle(open_port)
                measured.append(asyncio.run(_one_round(client, outputs)))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    lines = _lines(measured)
    print("\n".join(lines))
    if report is not None:
        _write(report, lines, decode_stretch, outputs)


def _lines(rounds: Sequence[Round]) -> list[str]:
    header = (
        "round",
        "median gap, ms",
        "before the newcomer",
        "beside it",
        "worst gap, ms",
        "worst / median",
        "worst / median before",
        "newcomer's first token, s",
    )
    rows = []
    for idx, one in enumerate(rounds, start=1):
        values = (median(one.gaps), median(one.before), median(one.beside), one.worst)
        rows.append(
            (
                f"{idx}",
                *(f"{1000 * value:.1f}" for value in values),
                f"{one.worst / median(one.gaps):.2f}",
                f"{one.worst / median(one.before):.2f}",
                f"{one.newcomer_ttft:.2f}",
            )
        )
    worst = median(one.worst / median(one.gaps) for one in rounds)
    return [
        *markdown_table(header, rows),
        "",
        f"Worst gap / median gap, median of the rounds: {worst:.2f}; wanted: at most {LIMIT:g}.",
    ]


def _write(path: Path, lines: Sequence[str], stretch: float, num_outputs: int) -> None:
    head = (
        "# A long prompt among streams that decode\n\n"
        f"`python -m shoal.load.newcomer_gap --report {path}` makes this page: SmolLM2-135M in "
        f"bfloat16 behind Triton and the OpenAI endpoint, client and server on one machine "
        f"({cpu_name()}). {NUM_STREAMS} streams of {num_outputs} tokens decode when a prompt of "
        f"{NUM_NEWCOMER_TOKENS:,} random tokens comes; no prefix cache; decode_stretch "
        f"{stretch:g}. A gap is the time between two events of a stream, from when all of them "
        "decode to their ends.\n\n"
    )
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
