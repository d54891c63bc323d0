"""Tenants, tiers and overload in virtual time, in several shapes: the promises as one table each.

python -m shoal.load.fairness --report load/reports/fairness.md
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from shoal.load.measures import summarize
from shoal.load.records import Outcome, RequestRecord, SimulationResult
from shoal.load.report import markdown_table
from shoal.load.simulation import Simulation, SimulationConfig, saturation_rate
from shoal.load.step_cost import FITS_FOLDER, StepCostFit
from shoal.load.workload import Request, Workload, segment_tokens
from shoal.load.workloads import (
    FLOOD_FACTOR,
    TIERS,
    WorkloadOptions,
    bursts,
    light_alone,
    long_documents,
    overload,
    poisson,
    sla_tiers,
    two_tenants,
)

FITS = ("smollm2-135m-bfloat16-native-1cpu", "smollm2-135m-float32-1cpu")
MAX_QUEUED = 256
Make = Callable[[WorkloadOptions], Workload]


@dataclass(frozen=True, slots=True)
class Shape:
    """How the heavy tenant sends its ten times as much, and how the light one its load of 0.2."""

    name: str
    heavy: Make
    light: Make


def _heavy_poisson(options: WorkloadOptions) -> Workload:
    flood = [request for request in two_tenants(options).requests if request.tenant == "flood"]
    return Workload("heavy", "", flood)


def _scaled(make: Make, load: float, share: int) -> Make:
    """A workload at another load, with its part of the requests."""

    def scaled(options: WorkloadOptions) -> Workload:
        num_requests = (options.num_requests or 2200) * share // (FLOOD_FACTOR + 1)
        return make(replace(options, load=load, num_requests=num_requests))

    return scaled


SHAPES = (
    Shape("Poisson", _heavy_poisson, light_alone),
    Shape("heavy in bursts", _scaled(bursts, 2.0, FLOOD_FACTOR), light_alone),
    Shape("heavy with long prompts", _scaled(long_documents, 2.0, FLOOD_FACTOR), light_alone),
    Shape("light in bursts", _heavy_poisson, _scaled(bursts, 0.2, 1)),
)


def run(workload: Workload, config: SimulationConfig) -> SimulationResult:
    segment_tokens.cache_clear()
    return Simulation(workload, config).run()


def _of_tenant(workload: Workload, tenant: str, end: float = float("inf")) -> list[Request]:
    chosen = [request for request in workload.requests if request.arrival <= end]
    for request in chosen:
        request.tenant = tenant
    return chosen


def tenant_rows(config: SimulationConfig, options: WorkloadOptions) -> Iterator[tuple[str, ...]]:
    """A light tenant's time to first token beside a heavy one, over its own alone."""
    for shape in SHAPES:
        light = _of_tenant(shape.light(options), "light")
        alone = run(Workload("light", "", light), config)
        for policy in ("fcfs", "vtc", "wfq"):
            light = _of_tenant(shape.light(options), "light")
            heavy = _of_tenant(shape.heavy(options), "heavy", light[-1].arrival)
            both = run(Workload("both", "", light + heavy), replace(config, policy=policy))
            a, b = p95(alone.records), p95([r for r in both.records if r.tenant == "light"])
            served = sum(r.outcome is Outcome.FINISHED for r in both.records if r.tenant == "light")
            yield (
                shape.name,
                policy,
                f"{a:.2f}",
                f"{b:.2f}",
                f"{b / a:.2f}",
                f"{served} of {len(light)}",
                f"{summarize(both).output_tokens_per_s:.1f}",
            )


def tier_rows(config: SimulationConfig, options: WorkloadOptions) -> Iterator[tuple[str, ...]]:
    """Three tiers in equal parts, beyond the capacity, while requests arrive."""
    for policy in ("priority", "wfq", "vtc"):
        workload = sla_tiers(replace(options, load=1.5))
        result = run(workload, replace(config, policy=policy))
        by_tier = {name: [r for r in result.records if r.slo_class == name] for name in TIERS}
        high, low = by_tier["interactive"], by_tier["batch"]
        ratio = p50(high) / p50(low)
        yield (
            policy,
            *(f"{p50(records):.2f}" for records in by_tier.values()),
            f"{ratio:.3f}",
            f"{result.longest_pauses['batch']:.2f}",
        )


def overload_rows(config: SimulationConfig, options: WorkloadOptions) -> Iterator[tuple[str, ...]]:
    """Ten times the capacity against just over it; refused clients retry when they are told to."""
    for policy in ("fcfs", "vtc", "wfq"):
        retrying = replace(config, policy=policy, max_queued_requests=64, max_retries=100)
        full = summarize(run(poisson(replace(options, load=1.3)), retrying))
        over = summarize(run(overload(options), retrying))
        retry = over.retry_after
        assert retry is not None
        yield (
            policy,
            f"{full.output_tokens_per_s:.1f}",
            f"{over.output_tokens_per_s:.1f}",
            f"{over.output_tokens_per_s / full.output_tokens_per_s:.1%}",
            f"{retry.median_told_s:.0f}",
            f"{retry.median_error or 0:.1%}",
            f"{retry.median_line_error or 0:.1%}",
        )


def p95(records: Sequence[RequestRecord]) -> float:
    return float(np.percentile([_ttft(record) for record in records], 95))


def p50(records: Sequence[RequestRecord]) -> float:
    return float(np.median([_ttft(record) for record in records]))


def _ttft(record: RequestRecord) -> float:
    """Seconds; of one that never had a token, until its end."""
    if record.ttft is not None:
        return record.ttft
    return (record.ended or 0.0) - record.arrival


_TENANT_HEADER = (
    "shape",
    "policy",
    "p95 alone, s",
    "p95 beside, s",
    "beside / alone",
    "light finished",
    "output of both, tokens/s",
)
_TIER_HEADER = ("policy", *(f"p50 of {name}, s" for name in TIERS), "highest / lowest", "pause, s")
_OVERLOAD_HEADER = (
    "policy",
    "output at 1.3, tokens/s",
    "at 10",
    "goodput",
    "told, p50, s",
    "error, p50",
    "against the line, p50",
)


def sections(fit_name: str, seed: int, requests: int) -> list[str]:
    fit = StepCostFit.load(FITS_FOLDER / f"{fit_name}.json")
    config = SimulationConfig(cost=fit.cost, max_queued_requests=MAX_QUEUED)
    options = WorkloadOptions(
        capacity=partial(saturation_rate, config), seed=seed, num_requests=requests
    )
    lines = [f"## Steps of {fit_name}", ""]
    for header, rows, num_requests in (
        (_TENANT_HEADER, tenant_rows, requests),
        (_TIER_HEADER, tier_rows, requests // 4),
        (_OVERLOAD_HEADER, overload_rows, requests // 4),
    ):
        of = replace(options, num_requests=num_requests)
        lines += [*markdown_table(header, list(rows(config, of))), ""]
    return lines


def main(
    seed: int = 0,
    requests: Annotated[int, typer.Option(help="Of both tenants; a quarter elsewhere.")] = 8800,
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Print the tables, and write a report if asked."""
    try:
        lines = [line for name in FITS for line in sections(name, seed, requests)]
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(lines))
    if report is not None:
        report.write_text("\n".join([*_head(report, seed, requests), *lines]), encoding="utf-8")


def _head(report: Path, seed: int, requests: int) -> list[str]:
    return [
        "# Tenants, tiers and overload, in virtual time",
        "",
        f"`python -m shoal.load.fairness --seed {seed} --requests {requests} --report {report}` "
        "makes this page: the real dispatcher and schedulers, 64 slots, steps of 512 tokens.",
        "",
        f"**Tenants**: a light one asks for 0.2 of the capacity, alone (first come, first served), "
        f"then beside one that sends {FLOOD_FACTOR} times as much; a queue of {MAX_QUEUED}. A "
        "refused request counts with the time until its refusal. **Tiers**: three in equal parts, "
        "1.5 times the capacity; *pause*: the longest time in which no request of the lowest got "
        "a token. **Overload**: 10 times the capacity against 1.3 times, a queue of 64; refused "
        "clients retry when they are told to. The error is |told − wait| / wait, of what a client "
        "was told first against the wait until a retry was accepted, or against a line at the door "
        "(see load/README.md).",
        "",
    ]


if __name__ == "__main__":
    typer.run(main)
