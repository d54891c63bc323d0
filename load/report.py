"""Shows a summary: a table on the terminal, and a Markdown report with plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from shoal.load.measures import GroupSummary, Percentiles, RetryAfterSummary, Summary
from shoal.load.records import Outcome, RequestRecord, SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_WIDTH = 170  # columns of the terminal
_GROUP_COLUMNS = (
    "group",
    "requests",
    "finished",
    "refused",
    "other",
    "queued p50 / p95, s",
    "TTFT p50 / p95 / p99, s",
    "TPOT p50 / p95, ms",
    "E2E p50 / p95, s",
    "goodput",
    "cached",
)


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a reader needs to repeat the run. ``facts``: a name and its value a line."""

    title: str
    command: str
    facts: Sequence[tuple[str, str]]


def make_console() -> Console:
    """A console wide enough for the tables, also where the output goes to a file."""
    return Console(width=max(MIN_WIDTH, Console().width))


def print_summary(summary: Summary, title: str, console: Console) -> None:
    """The tables, for people at a terminal."""
    groups = Table(title=title, title_justify="left")
    for column in _GROUP_COLUMNS:
        groups.add_column(column, justify="left" if column == "group" else "right", no_wrap=True)
    for row in _group_rows(summary):
        groups.add_row(*row)
    totals = Table(show_header=False)
    for name, value in _total_rows(summary):
        totals.add_row(name, value)
    console.print(groups)
    console.print(totals)


def write_report(
    path: Path, result: SimulationResult, summary: Summary, context: ReportContext
) -> list[Path]:
    """Write ``path`` and its plots beside it; returns all that was written.

    Raises ImportError, before anything is written, where matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # the ``load`` extra; no run without a report needs it

    latency = path.with_name(f"{path.stem}-latency.png")
    timeline = path.with_name(f"{path.stem}-timeline.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    _plot_latency(figure, result)
    figure.savefig(latency, dpi=90, metadata={"Software": None})
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    _plot_timeline(figure, result)
    figure.savefig(timeline, dpi=90, metadata={"Software": None})
    path.write_text(_markdown(result, summary, context, latency, timeline), encoding="utf-8")
    return [path, latency, timeline]


def _markdown(
    result: SimulationResult,
    summary: Summary,
    context: ReportContext,
    latency: Path,
    timeline: Path,
) -> str:
    lines = [
        f"# {context.title}",
        "",
        result.workload.description,
        "",
        "Simulated: the real dispatcher, scheduler and KV manager in virtual time; only the steps "
        "of the model are replaced, by their fitted duration. Repeat it with",
        "",
        f"    {context.command}",
        "",
        *markdown_table(("setting", "value"), context.facts),
        "",
        "## Requests",
        "",
        *markdown_table(_GROUP_COLUMNS, _group_rows(summary)),
        "",
        "Goodput: the share of all requests that finished within their tier's targets ("
        + "; ".join(
            f"{name}: TTFT {tier.ttft_ms:g} ms, TPOT {tier.tpot_ms:g} ms"
            for name, tier in result.workload.tiers.items()
        )
        + "). Times are those of finished requests, as the client sees them; *queued* is the "
        "part of the TTFT before a worker got the request.",
        "",
        "## The whole",
        "",
        *markdown_table(("measure", "value"), _total_rows(summary)),
        "",
        f"![Latency]({latency.name})",
        "",
        f"![Over time]({timeline.name})",
        "",
    ]
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _group_rows(summary: Summary) -> list[tuple[str, ...]]:
    rows = [_group_row(summary.overall, "all")]
    rows += [_group_row(group, f"tenant {group.name}") for group in summary.tenants]
    rows += [_group_row(group, f"tier {group.name}") for group in summary.tiers]
    return rows


def _group_row(group: GroupSummary, label: str) -> tuple[str, ...]:
    num_finished = group.outcomes.get(Outcome.FINISHED, 0)
    num_refused = group.outcomes.get(Outcome.REFUSED, 0)
    cached = group.cached_tokens / group.prompt_tokens if group.prompt_tokens else 0.0
    return (
        label,
        f"{group.num_requests:,}",
        f"{num_finished:,}",
        f"{num_refused:,}",
        f"{group.num_requests - num_finished - num_refused:,}",
        _times(group.queued, ("p50", "p95"), 1, 2),
        _times(group.ttft, ("p50", "p95", "p99"), 1, 2),
        _times(group.tpot, ("p50", "p95"), 1000, 0),
        _times(group.e2e, ("p50", "p95"), 1, 2),
        f"{group.goodput:.1%}",
        f"{cached:.1%}",
    )


def _times(times: Percentiles | None, names: Sequence[str], factor: float, digits: int) -> str:
    if times is None:
        return "–"
    return " / ".join(f"{getattr(times, name) * factor:,.{digits}f}" for name in names)


def _total_rows(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("virtual duration", f"{summary.duration_s:,.1f} s"),
        ("finished", f"{summary.requests_per_s:.2f} requests/s"),
        ("goodput", f"{summary.good_per_s:.2f} requests/s"),
        ("output", f"{summary.output_tokens_per_s:,.1f} tokens/s"),
        (
            "time in steps, by worker",
            ", ".join(f"{u:.1%}" for u in summary.utilisation),
        ),
        ("sequences in a step, mean", f"{summary.mean_batch:.1f} over {summary.num_steps:,} steps"),
        ("KV blocks in use, mean", f"{summary.mean_kv_usage:.1%}"),
        ("preemptions", f"{summary.num_preemptions:,}"),
        ("longest queue", f"{summary.max_queued:,}"),
    ]
    if summary.retry_after is not None:
        rows += _retry_rows(summary.retry_after)
    if summary.jain is not None:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in summary.service_shares.items())
        rows += [
            ("all tenants had requests queued", f"{summary.contended_s:,.1f} s"),
            ("service in that time", shares),
            ("Jain index of service / weight", f"{summary.jain:.3f}"),
        ]
    return rows


def _retry_rows(retry: RetryAfterSummary) -> list[tuple[str, str]]:
    rows = [
        ("refusals with Retry-After", f"{retry.num_told:,}, median {retry.median_told_s:.2f} s"),
        ("of these, never accepted", f"{retry.num_open:,}"),
    ]
    if retry.median_error is not None and retry.p90_error is not None:
        rows.append(
            ("error of Retry-After, p50 / p90", f"{retry.median_error:.1%} / {retry.p90_error:.1%}")
        )
    if retry.median_line_error is not None:
        rows.append(("the same against a line at the door, p50", f"{retry.median_line_error:.1%}"))
    return rows


def _plot_latency(figure: Figure, result: SimulationResult) -> None:
    ttft, tpot = figure.subplots(1, 2)
    for label, records in _plotted_groups(result.records).items():
        _plot_distribution(ttft, [r.ttft for r in records], label)
        _plot_distribution(tpot, [r.tpot for r in records], label)
    ttft.set(xlabel="time to first token, s", ylabel="share of finished requests", xscale="log")
    tpot.set(xlabel="time per output token, s")
    for axes in (ttft, tpot):
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    ttft.legend()


def _plotted_groups(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """By tenant and tier, as far as they differ."""
    groups: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        if record.outcome is Outcome.FINISHED:
            groups.setdefault((record.tenant, record.slo_class), []).append(record)
    tenants = {tenant for tenant, _ in groups}
    return {
        (tenant if len(tenants) > 1 else tier): groups[tenant, tier]
        for tenant, tier in sorted(groups)
    }


def _plot_distribution(axes: Axes, values: Sequence[float | None], label: str) -> None:
    known = sorted(value for value in values if value is not None)
    if known:
        axes.plot(known, [(i + 1) / len(known) for i in range(len(known))], label=label)


def _plot_timeline(figure: Figure, result: SimulationResult) -> None:
    times = [sample.time for sample in result.timeline]
    load, memory = figure.subplots(2, 1, sharex=True)
    load.plot(times, [s.num_queued for s in result.timeline], label="queued")
    load.plot(times, [s.num_running + s.num_waiting for s in result.timeline], label="on workers")
    load.set(ylabel="requests")
    load.legend()
    memory.plot(times, [s.kv_usage for s in result.timeline], color="tab:green")
    memory.set(ylabel="KV blocks in use", xlabel="virtual time, s", ylim=(0, 1))
    for axes in (load, memory):
        axes.grid(alpha=0.3)
