"""Tenants and tiers that share a real server: who waits for whom.

    python -m shoal.load.sharing tenants --report load/reports/tenants-served.md
    python -m shoal.load.sharing tiers --report load/reports/tiers-served.md

Starts servers of its own. ``tenants``: a light tenant alone, and beside one that sends ten times as
much. ``tiers``: three tiers, together more than the server can do.
"""

import asyncio
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
HEAD_START_S = 2.0  # in which the heavy tenant fills the slots
LAST_S = 2.0  # that the last requests have for their end
LIGHT_LOAD = 0.15  # of what the server can do
TIERS = {"interactive": {"weight": 8}, "standard": {"weight": 2}, "batch": {"weight": 1}}
TIER_LOAD = 1.5  # of all tiers together

app = typer.Typer(add_completion=False, no_args_is_help=True, help=(__doc__ or "").split("\n")[0])

Port = Annotated[int, typer.Option(help="The first of 4, of 8 for tenants.")]
Seconds = Annotated[float, typer.Option(help="Of each load.")]
Report = Annotated[Path | None, typer.Option(help="Write Markdown there.")]


def make_request(draw: random.Random, at: float, **whose: str) -> LiveRequest:
    return LiveRequest(at, draw.randint(16, 96), draw.randint(4, 16), **whose)


@app.command()
def tenants(
    port: Port = 19130,
    seconds: Seconds = 32.0,
    policy: str = "vtc",
    rounds: Annotated[int, typer.Option(help="In which each load comes in parts.")] = 4,
    report: Report = None,
) -> None:
    """A light tenant's time to first token, alone and beside one that sends ten times as much."""
    loads = Loads()
    try:
        # A server for each load: a policy remembers for a while that there were several tenants.
        with (
            live_server(port, policy=policy, max_num_seqs=CONCURRENCY) as alone_port,
            live_server(port + 4, policy=policy, max_num_seqs=CONCURRENCY) as beside_port,
        ):
            alone, beside = LiveClient(alone_port, MODEL), LiveClient(beside_port, MODEL)
            warm_up(alone, alone_port)
            rate = LIGHT_LOAD * saturation(beside, beside_port)
            for index in range(rounds):
                light, heavy = _tenants_round(index, rate, seconds / rounds)
                if index % 2 == 0:
                    loads.run_alone(alone, light)
                loads.run_beside(beside, light, heavy)
                wait_idle(beside_port)
                if index % 2 == 1:
                    loads.run_alone(alone, light)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    rows = [
        ("light, alone", *_ttfts(loads.alone)),
        ("light, beside the heavy one", *_ttfts(loads.beside)),
        ("heavy", *_ttfts(loads.heavy)),
    ]
    low, high = loads.likely_ratios()
    gaps = sorted(loads.heavy_gaps())
    _show(
        [
            *markdown_table(_HEADER, rows),
            "",
            f"p95 beside / alone: {loads.ratio():.2f} (90 % of resamples: {low:.2f} to {high:.2f})."
            f" Light sends {rate:.2f} requests/s, heavy {HEAVY_FACTOR} times as many; together "
            f"{loads.tokens_beside / seconds:.0f} output tokens/s. The time between two tokens of "
            f"a heavy request: p50 {percentile(gaps, 0.5):.3f} s, p99 {percentile(gaps, 0.99):.3f}"
            f" s, longest {gaps[-1]:.3f} s.",
        ],
        report,
        "Two tenants, on the real server",
        f"tenants --policy {policy} --seconds {seconds:g} --rounds {rounds}",
        f" {rounds} rounds of {seconds / rounds:g} s for each load, in turns; the heavy tenant "
        f"begins {HEAD_START_S:g} s earlier. A server for each load, the other one idle.",
    )


@dataclass(slots=True)
class Loads:
    """What came of all rounds. The light tenant's requests are the same, in the same order, alone
    and beside the heavy one's."""

    alone: list[LiveRecord] = field(default_factory=list)
    beside: list[LiveRecord] = field(default_factory=list)
    heavy: list[LiveRecord] = field(default_factory=list)
    tokens_beside: float = 0.0  # of both, while the light tenant sends

    def run_alone(self, client: LiveClient, light: Sequence[LiveRequest]) -> None:
        until = light[-1].at + LAST_S
        self.alone += asyncio.run(client.run(light, until=until))

    def run_beside(
        self, client: LiveClient, light: Sequence[LiveRequest], heavy: Sequence[LiveRequest]
    ) -> None:
        late = [replace(request, at=request.at + HEAD_START_S) for request in light]
        until = max(late[-1].at, heavy[-1].at) + LAST_S
        records = asyncio.run(client.run([*late, *heavy], until=until))
        self.beside += records[: len(light)]
        self.heavy += records[len(light) :]
        self.tokens_beside += tokens_in(records, HEAD_START_S, heavy[-1].at)

    def ratio(self, chosen: Sequence[int] | None = None) -> float:
        """p95 beside / alone, of all of the light tenant's requests or of those chosen."""
        indices = range(len(self.alone)) if chosen is None else chosen
        alone, beside = (
            percentile([waited(records[i], math.inf) for i in indices], 0.95)
            for records in (self.alone, self.beside)
        )
        return beside / alone

    def likely_ratios(self) -> tuple[float, float]:
        """Between which 90 % of the ratios lie, of requests drawn again from these."""
        draw = random.Random(0)
        indices = range(len(self.alone))
        ratios = sorted(self.ratio(draw.choices(indices, k=len(indices))) for _ in range(400))
        return ratios[20], ratios[-21]

    def heavy_gaps(self) -> list[float]:
        return [
            b - a
            for record in self.heavy
            for a, b in zip(record.token_times, record.token_times[1:], strict=False)
        ]


def _tenants_round(
    index: int, rate: float, seconds: float
) -> tuple[list[LiveRequest], list[LiveRequest]]:
    """The light tenant's requests, and the heavy one's, who begins earlier."""
    light = poisson(
        f"light {index}", rate, seconds, lambda draw, at: make_request(draw, at, tenant="light")
    )
    heavy = poisson(
        f"heavy {index}",
        HEAVY_FACTOR * rate,
        HEAD_START_S + seconds,
        lambda draw, at: make_request(draw, at, tenant="heavy"),
    )
    return light, heavy


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


def warm_up(client: LiveClient, port: int) -> None:
    draw = random.Random(0)
    asyncio.run(client.run_closed(lambda: make_request(draw, 0.0), CONCURRENCY, 3.0))
    wait_idle(port)


def saturation(client: LiveClient, port: int) -> float:
    """Requests per second that the server can do, by the tokens it gives when it is kept full."""
    draw = random.Random(0)
    warm_up(client, port)
    seconds = 12.0
    records = asyncio.run(
        client.run_closed(lambda: make_request(draw, 0.0), CONCURRENCY + 4, seconds)
    )
    wait_idle(port)
    rate = tokens_in(records, seconds / 3, seconds) / (seconds * 2 / 3) / MEAN_OUTPUTS
    if not rate:
        raise RuntimeError("the server gave no token in 12 s.")
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


def _show(lines: list[str], report: Path | None, title: str, command: str, how: str = "") -> None:
    print("\n".join(lines))
    if report is None:
        return
    head = (
        f"# {title}\n\n`python -m shoal.load.sharing {command} --report {report}` makes this page: "
        f"SmolLM2-135M behind Triton and the OpenAI endpoint, {CONCURRENCY} slots, client and "
        f"server on one machine ({cpu_name()}). Prompts of 16 to 96 random tokens, 4 to 16 "
        f"outputs, Poisson arrivals.{how}\n\n"
    )
    report.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
