"""Medians over rounds, ratios to the best peer, fractions of the roofline."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.load.compare.contenders import OURS
from shoal.load.compare.limits import Limits
from shoal.load.compare.records import MachineLimits, Measured, Record, Repeated
from shoal.load.compare.roofline import Peaks

METRICS = ("tokens_per_s", "ttft_p50", "tpot_p50", "tpot_p95")
HIGHER_IS_BETTER = frozenset({"tokens_per_s"})


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))


@dataclass(frozen=True, slots=True)
class Row:
    """A contender at a number of streams: each of METRICS over its rounds."""

    name: str
    streams: int
    metrics: dict[str, Spread]
    rounds: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours against the best peer's median. Above 1 is better where higher is better."""

    ours: float
    best: float
    best_name: str

    @property
    def value(self) -> float:
        return self.ours / self.best


def rows(records: Sequence[Record], model: str, bits: str) -> list[Row]:
    """By streams, then in the order in which contenders first appear."""
    groups: dict[tuple[int, str], list[Measured]] = {}
    names: dict[str, int] = {}
    for record in records:
        if isinstance(record, Measured) and (record.model, record.bits) == (model, bits):
            names.setdefault(record.name, len(names))
            groups.setdefault((record.result.streams, record.name), []).append(record)
    return [
        Row(
            name,
            streams,
            {metric: Spread.of(getattr(one.result, metric) for one in group) for metric in METRICS},
            len(group),
        )
        for (streams, name), group in sorted(
            groups.items(), key=lambda item: (item[0][0], names[item[0][1]])
        )
    ]


def ratio(table: Sequence[Row], streams: int, metric: str) -> Ratio | None:
    """None when we or every peer are missing."""
    at = {row.name: row.metrics[metric].median for row in table if row.streams == streams}
    ours = at.pop(OURS, None)
    if ours is None or not at:
        return None
    best = max if metric in HIGHER_IS_BETTER else min
    name = best(at, key=lambda name: at[name])
    return Ratio(ours, at[name], name)


def repeats(records: Sequence[Record], model: str, bits: str) -> dict[str, tuple[Spread, Spread]]:
    """By contender, the median TTFT of each round: of a prompt's first time, and of its second."""
    groups: dict[str, list[Repeated]] = {}
    for record in records:
        if isinstance(record, Repeated) and (record.model, record.bits) == (model, bits):
            groups.setdefault(record.name, []).append(record)
    return {
        name: (
            Spread.of(statistics.median(one.result.first_ttft) for one in group),
            Spread.of(statistics.median(one.result.repeat_ttft) for one in group),
        )
        for name, group in groups.items()
    }


def median_limits(records: Sequence[Record]) -> Limits | None:
    """Of the rounds' best."""
    found = [record.limits for record in records if isinstance(record, MachineLimits)]
    if not found:
        return None
    return Limits(
        statistics.median(limits.read_gb for limits in found),
        statistics.median(limits.bf16_gflop for limits in found),
        statistics.median(limits.int8_gop for limits in found),
    )


def peaks(limits: Limits, bits: str) -> Peaks:
    """What bounds a model in these bits."""
    product = limits.bf16_gflop if bits == "bf16" else limits.int8_gop
    return Peaks(limits.read_gb * 1e9, product * 1e9)
