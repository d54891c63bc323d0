"""Tenants and tiers that share a real server: who waits for whom.

    python -m shoal.load.sharing tenants --report load/reports/tenants-served.md
    python -m shoal.load.sharing tiers --report load/reports/tiers-served.md

Starts a server of its own. ``tenants``: a light tenant alone, then beside one that sends ten times
as much. ``tiers``: three tiers, together more than the server can do.
"""

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.live_client import LiveClient, LiveRecord, LiveRequest, poisson
from shoal.load.live_server import MODEL, live_server, wait_idle
from shoal.load.overload import tokens_in
from shoal.load.report import markdown_table
from shoal.load.scheduler_cost import cpu_name

CONCURRENCY = 16
MEAN_OUTPUTS = 10
HEAVY_FACTOR = 10
LIGHT_LOAD = 0.15  # of what the server can do
TIERS = {"interactive": {"weight": 8}, "standard": {"weight": 2}, "batch": {"weight": 1}}
TIER_LOAD = 1.5  # of all tiers together

app = typer.Typer(add_completion=False, no_args_is_help=True, help=(__doc__ or "").split("\n")[0])

Port = Annotated[int, typer.Option(help="Of the server, and the three after it.")]
Seconds = Annotated[float, typer.Option(help="Of each load.")]
Report = Annotated[Path | None, typer.Option(help="Write Markdown there.")]


def make_request(draw: random.Random, at: float, **whose: str) -> LiveRequest:
    return LiveRequest(at, draw.randint(16, 96), draw.randint(4, 16), **whose)


@app.command()
def tenants(
    port: Port = 19130, seconds: Seconds = 40.0, policy: str = "vtc", report: Report = None
) -> None:
    """A light tenant's time to first token, alone and beside one that sends ten times as much."""
    try:
        with live_server(port, policy=policy, max_num_seqs=CONCURRENCY) as open_port:
            client = LiveClient(open_port, MODEL)
            rate = LIGHT_LOAD * saturation(client, open_port)
            light = poisson(
                "light", rate, seconds, lambda draw, at: make_request(draw, at, tenant="light")
            )
            heavy = poisson(
                "heavy",
                HEAVY_FACTOR * rate,
                seconds,
                lambda draw, at: make_request(draw, at, tenant="heavy"),
            )
            alone = asyncio.run(client.run(light, until=2 * seconds))
            wait_idle(open_port)
            both = asyncio.run(client.run([*light, *heavy], until=1.2 * seconds))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    beside = [record for record in both if record.request.tenant == "light"]
    rows = [
        ("light, alone", *_ttfts(alone)),
        ("light, beside the heavy one", *_ttfts(beside)),
        ("heavy", *_ttfts([r for r in both if r.request.tenant == "heavy"])),
    ]
    p95 = [percentile([r.ttft for r in records], 0.95) for records in (alone, beside)]
    _show(
        [
            *markdown_table(_HEADER, rows),
            "",
            f"p95 beside / alone: {p95[1] / p95[0]:.2f}. Light sends {rate:.2f} requests/s, heavy "
            f"{HEAVY_FACTOR} times as many; together {tokens_in(both, 0, seconds) / seconds:.0f} "
            "output tokens/s.",
        ],
        report,
        "Two tenants, on the real server",
        f"tenants --policy {policy}",
    )


@app.command()
def tiers(
    port: Port = 19130, seconds: Seconds = 40.0, policy: str = "wfq", report: Report = None
) -> None:
    """Three tiers in equal parts at one and a half times what the server can do."""
    try:
        with live_server(port, policy=policy, tiers=TIERS, max_num_seqs=CONCURRENCY) as open_port:
            client = LiveClient(open_port, MODEL)
            rate = TIER_LOAD * saturation(client, open_port) / len(TIERS)
            requests = [request for name in TIERS for request in _of_tier(name, rate, seconds)]
            records = asyncio.run(client.run(requests, until=seconds))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    by_tier = {name: [r for r in records if r.request.slo_class == name] for name in TIERS}
    pauses = {name: longest_pause(of_tier, seconds) for name, of_tier in by_tier.items()}
    p50 = [
        percentile([waited(r, seconds) for r in by_tier[name]], 0.5)
        for name in ("interactive", "batch")
    ]
    _show(
        [
            *markdown_table(
                (*_HEADER, "longest time without a token, s"),
                [(name, *_ttfts(of), f"{pauses[name]:.2f}") for name, of in by_tier.items()],
            ),
            "",
            f"p50 of the highest / of the lowest tier: {p50[0] / p50[1]:.3f}, one without "
            f"a token counted with the time it waited. {rate:.2f} requests/s of each tier.",
        ],
        report,
        "Tiers at saturation, on the real server",
        f"tiers --policy {policy}",
    )


def _of_tier(name: str, rate: float, seconds: float) -> list[LiveRequest]:
    return poisson(name, rate, seconds, lambda draw, at: make_request(draw, at, slo_class=name))


_HEADER = ("who", "requests", "with a token", "TTFT p50, s", "p95, s")


def saturation(client: LiveClient, port: int) -> float:
    """Requests per second that the server can do, by the tokens it gives when it is kept full."""
    draw = random.Random(0)
    asyncio.run(client.run_closed(lambda: make_request(draw, 0.0), CONCURRENCY, 4.0))  # warm up
    wait_idle(port)
    seconds = 15.0
    records = asyncio.run(
        client.run_closed(lambda: make_request(draw, 0.0), CONCURRENCY + 4, seconds)
    )
    wait_idle(port)
    rate = tokens_in(records, seconds / 3, seconds) / (seconds * 2 / 3) / MEAN_OUTPUTS
    if not rate:
        raise RuntimeError("the server gave no token in 15 s.")
    return rate


def waited(record: LiveRecord, end: float) -> float:
    """Time to first token; of one without any, what it had waited at the end."""
    return end - record.request.at if record.ttft is None else record.ttft


def percentile(values: Sequence[float | None], share: float) -> float:
    """Of the known values; infinite where there is none."""
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) - 1, int(share * len(known)))] if known else float("inf")


def longest_pause(records: Sequence[LiveRecord], seconds: float) -> float:
    """The longest time in which no request of these got a token, after the first came."""
    first = min((record.sent for record in records), default=0.0)
    times = sorted(at for record in records for at in record.token_times if at < seconds)
    return max(b - a for a, b in zip([first, *times], [*times, seconds], strict=True))


def _ttfts(records: Sequence[LiveRecord]) -> tuple[str, ...]:
    ttfts = [record.ttft for record in records]
    return (
        f"{len(records)}",
        f"{sum(ttft is not None for ttft in ttfts)}",
        f"{percentile(ttfts, 0.5):.2f}",
        f"{percentile(ttfts, 0.95):.2f}",
    )


def _show(lines: list[str], report: Path | None, title: str, command: str) -> None:
    print("\n".join(lines))
    if report is None:
        return
    head = (
        f"# {title}\n\n`python -m shoal.load.sharing {command} --report {report}` makes this page: "
        f"SmolLM2-135M behind Triton and the OpenAI endpoint, {CONCURRENCY} slots, client and "
        f"server on one machine ({cpu_name()}). Prompts of 16 to 96 random tokens, 4 to 16 "
        "outputs, Poisson arrivals, the same in both loads.\n\n"
    )
    report.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
