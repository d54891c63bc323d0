"""The page: tables of medians and ranges, ratios, fractions of the roofline, plots."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from shoal.load.compare.contenders import BITS, MissingError, checkpoint
from shoal.load.compare.plots import plot_model
from shoal.load.compare.records import Machine, MachineLimits, Measured, Record, Skipped
from shoal.load.compare.roofline import ModelShape, best_tokens_per_s
from shoal.load.compare.summary import (
    METRICS,
    Ratio,
    Row,
    Spread,
    median_limits,
    peaks,
    ratio,
    repeats,
    rows,
)
from shoal.load.report import markdown_table

TITLES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
LENGTHS = (128, 128)  # tokens of prompt and answer
_COLUMNS = ("tokens/s", "TTFT p50, ms", "TPOT p50, ms", "TPOT p95, ms")


def write_report(records: Sequence[Record], folder: Path, path: Path) -> None:
    """Build the page and its plots anew from all records. ``folder``: the peers'."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*_head(records), "", *_limit_lines(records), ""]
    models = dict.fromkeys(r.model for r in records if isinstance(r, Measured))
    for model in models:
        shape = _shape(folder, model)
        picture = path.with_name(f"{path.stem}-{model}.png")
        rooflines = model_rooflines(records, model, shape)
        plot_model(picture, records, model, rooflines)
        lines += _model_lines(records, model, rooflines, picture.name)
    lines += _skipped_lines(records)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def model_rooflines(
    records: Sequence[Record], model: str, shape: ModelShape | None
) -> dict[tuple[str, int], float]:
    """Tokens a second at the roofline, by bits and streams; empty when limits are not known."""
    limits = median_limits(records)
    if limits is None or shape is None:
        return {}
    return {
        (bits, row.streams): best_tokens_per_s(
            shape, bits, peaks(limits, bits), row.streams, LENGTHS
        )
        for bits in BITS
        for row in rows(records, model, bits)
    }


def ratio_rows(records: Sequence[Record], model: str) -> list[tuple[str, ...]]:
    """Ours against the best peer of the same bits, a row for each bits and number of streams."""
    out = []
    for bits in BITS:
        table = rows(records, model, bits)
        for streams in dict.fromkeys(row.streams for row in table):
            cells = [_ratio_text(ratio(table, streams, metric)) for metric in METRICS]
            out.append((bits, str(streams), *cells))
    return out


def _head(records: Sequence[Record]) -> list[str]:
    machine = next((r for r in records if isinstance(r, Machine)), None)
    measured = [r for r in records if isinstance(r, Measured)]
    counts = {r.result.streams: r.result.requests for r in measured}
    requests = ", ".join(f"{counts[streams]} at {streams}" for streams in sorted(counts))
    loads = [r.load_average for r in measured] or [0.0]
    if machine is None:
        return ["# Servers compared on this CPU"]
    versions = ", ".join(f"{name} {number}".strip() for name, number in machine.versions.items())
    return [
        f"# Servers compared on a CPU, {machine.date}",
        "",
        "`python -m shoal.load.compare` makes this page ([how](../README.md)). All serve one "
        "checkpoint over their OpenAI endpoint to one client process, in a closed loop: "
        f"prompts of {LENGTHS[0]} tokens of random words, exactly {LENGTHS[1]} tokens of answer, "
        f"greedy, no speculation. Requests by streams: {requests}. Servers take turns, each "
        "started anew in each round; shown are medians of the rounds and, in brackets, their "
        "range. TTFT is from before the connection to the first text; TPOT from the first to the "
        "last text, a token.",
        "",
        f"{machine.cpu}, {machine.cores} cores, shared by server and client. Versions: "
        f"{versions}. The load average before each server's start was {min(loads):.1f} to "
        f"{max(loads):.1f} (median {statistics.median(loads):.1f}; what the run itself leaves "
        "there is about 2).",
    ]


def _limit_lines(records: Sequence[Record]) -> list[str]:
    limits = median_limits(records)
    if limits is None:
        return []
    found = [r.limits for r in records if isinstance(r, MachineLimits)]
    names = (
        ("memory read, GB/s", "read_gb"),
        ("bf16 product, GFLOP/s", "bf16_gflop"),
        ("int8 product, GOP/s", "int8_gop"),
    )
    return [
        "## Limits of the machine",
        "",
        f"Measured at the start of each round ({len(found)}) with torch on all cores (the sum of "
        "256 MiB in huge pages, products of square matrices), the best of a second's tries each.",
        "",
        *markdown_table(
            ("limit", "median", "range"),
            [
                (
                    title,
                    f"{getattr(limits, name):.1f}",
                    _range_text([getattr(one, name) for one in found]),
                )
                for title, name in names
            ],
        ),
        "",
        "The roofline of a run is the sum over its steps of max(bytes / read, operations / "
        "product), for all prompts in one step and then one step a token for all streams: each "
        "weight is read once a step at its bits, keys and values in 16; two operations for each "
        "weight and token, four for each element of a query and key pair. int8 and int4 are held "
        "against the int8 product.",
    ]


def _model_lines(
    records: Sequence[Record], model: str, rooflines: dict[tuple[str, int], float], picture: str
) -> list[str]:
    lines = [
        f"## {TITLES.get(model, model)}",
        "",
        f"![tokens a second, TTFT and TPOT]({picture})",
        "",
    ]
    for bits in BITS:
        if table := rows(records, model, bits):
            lines += [f"### {bits}", "", *_table(table, bits, rooflines), ""]
            lines += _repeat_lines(records, model, bits)
    return [
        *lines,
        "### Ours to the best peer of the same bits",
        "",
        "Ratios of medians, the best peer chosen for each figure by itself: tokens a second above "
        "1 and times below 1 are better.",
        "",
        *markdown_table(("bits", "streams", *_COLUMNS), ratio_rows(records, model)),
        "",
    ]


def _table(table: Sequence[Row], bits: str, rooflines: dict[tuple[str, int], float]) -> list[str]:
    out = []
    for row in table:
        tokens = row.metrics["tokens_per_s"].median
        best = rooflines.get((bits, row.streams))
        out.append(
            (
                str(row.streams),
                row.name,
                *(_spread_text(row.metrics[metric]) for metric in METRICS),
                f"{tokens / best:.0%} of {best:.0f}" if best else "",
                str(row.rounds),
            )
        )
    return markdown_table(("streams", "server", *_COLUMNS, "of the roofline", "rounds"), out)


def _repeat_lines(records: Sequence[Record], model: str, bits: str) -> list[str]:
    found = repeats(records, model, bits)
    if not found:
        return []
    return [
        "A prompt of 512 tokens, sent twice, nothing else running; medians of a round's prompts:",
        "",
        *markdown_table(
            ("server", "TTFT the first time, ms", "TTFT the second time, ms"),
            [
                (name, _spread_text(first), _spread_text(second))
                for name, (first, second) in found.items()
            ],
        ),
        "",
    ]


def _skipped_lines(records: Sequence[Record]) -> list[str]:
    measured = {(r.name, r.model, r.bits) for r in records if isinstance(r, Measured)}
    reasons = {
        (r.name, r.model, r.bits): r.reason
        for r in records
        if isinstance(r, Skipped) and (r.name, r.model, r.bits) not in measured
    }
    if not reasons:
        return []
    return [
        "## Not compared",
        "",
        *(
            f"- {name}, {TITLES.get(model, model)}, {bits}: {_one_line(reason)}"
            for (name, model, bits), reason in reasons.items()
        ),
        "",
    ]


def _shape(folder: Path, model: str) -> ModelShape | None:
    try:
        return ModelShape.of_checkpoint(checkpoint(folder, model))
    except MissingError:
        return None


def _one_line(reason: str) -> str:
    """What happened, and the last that the server said."""
    first, *rest = reason.splitlines()
    return f"{first} ({rest[-1].strip()[:200]})" if rest else first


def _spread_text(spread: Spread) -> str:
    digits = 1 if spread.median < 100 else 0
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def _range_text(values: Sequence[float]) -> str:
    return f"{min(values):.1f}–{max(values):.1f}"


def _ratio_text(found: Ratio | None) -> str:
    return f"{found.value:.2f} ({found.best_name})" if found else ""
