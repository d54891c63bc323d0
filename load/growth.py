"""Tokens a second as more streams share the server: 32, 64 or 128 requests at once.

    python -m shoal.load.growth --report load/reports/growth.md

Starts a server of its own, with 128 slots. How a step grows with context is in context_cost.py.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.live_client import LiveClient, LiveRequest
from shoal.load.live_server import MODEL, live_server, wait_idle
from shoal.load.report import markdown_table
from shoal.load.scheduler_cost import cpu_name

LEVELS = (32, 64, 128)
LENGTH = 128  # tokens of each prompt, and of each answer


def main(
    port: Annotated[int, typer.Option(help="Of the server, and the three after it.")] = 19130,
    decode_stretch: float = 1.8,
    report: Annotated[Path | None, typer.Option(help="Write Markdown and a plot there.")] = None,
) -> None:
    """Measure, print, and write a report if asked."""
    try:
        with live_server(
            port, max_num_seqs=max(LEVELS), decode_stretch=decode_stretch, prefix_caching=False
        ) as open_port:
            client = LiveClient(open_port, MODEL)
            asyncio.run(_together(client, 16, 16))  # warm up
            rates = []
            for level in LEVELS:
                wait_idle(open_port)
                rates.append(asyncio.run(_together(client, level, LENGTH)))
                print(f"{level} at once: {rates[-1]:.0f} tokens/s", flush=True)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    if report is not None:
        _write(report, rates)


async def _together(client: LiveClient, num_streams: int, num_outputs: int) -> float:
    """Output tokens per second from the first request sent to the last token."""
    client.restart()
    begun = [client.begin(LiveRequest(0.0, LENGTH, num_outputs)) for _ in range(num_streams)]
    await asyncio.gather(*(task for _, task in begun))
    records = [record for record, _ in begun]
    if not all(record.is_finished for record in records):
        raise RuntimeError("a request did not finish.")
    return sum(record.num_tokens for record in records) / client.now


def _write(path: Path, rates: Sequence[float]) -> None:
    rows = [
        (f"{level}", f"{rate:.0f}", f"{rate / rates[0]:.2f}")
        for level, rate in zip(LEVELS, rates, strict=True)
    ]
    picture = path.with_suffix(".png")
    _plot(rates, picture)
    lines = [
        "# Throughput as streams are added",
        "",
        f"`python -m shoal.load.growth --report {path}` makes this page: SmolLM2-135M in bfloat16 "
        "behind Triton and the OpenAI endpoint, client and server on one machine "
        f"({cpu_name()}). So many requests come at once, of {LENGTH} random prompt tokens and "
        f"{LENGTH} outputs; output tokens over the time from the first sent to the last answered.",
        "",
        *markdown_table(("at once", "tokens/s", f"against {LEVELS[0]}"), rows),
        "",
        f"![tokens per second over streams]({picture.name})",
        "",
        "How long a step takes as its context grows: [context-cost.md](context-cost.md).",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plot(rates: Sequence[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.4), layout="constrained")
    axes.plot(LEVELS, rates, "o-")
    axes.set_xlabel("streams at once")
    axes.set_ylabel("output tokens per second")
    axes.set_xticks(LEVELS)
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
