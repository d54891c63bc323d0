"""One picture a model: figures by contender, a column of plots for each of the bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.load.compare.contenders import BITS, OURS, PEERS
from shoal.load.compare.records import Record
from shoal.load.compare.summary import Row, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (("tokens_per_s", "tokens/s"), ("ttft_p50", "TTFT p50, ms"), ("tpot_p95", "TPOT p95, ms"))
_COLORS = {name: f"C{idx}" for idx, name in enumerate((OURS, *PEERS))}


def plot_model(
    path: Path,
    records: Sequence[Record],
    model: str,
    rooflines: dict[tuple[str, int], float],
) -> None:
    """Write the picture. A line over the bars of tokens a second is the roofline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = {bits: table for bits in BITS if (table := rows(records, model, bits))}
    figure, grid = pyplot.subplots(
        len(_PANELS),
        len(tables),
        figsize=(4.2 * len(tables), 8.4),
        squeeze=False,
        layout="constrained",
    )
    for column, (bits, table) in enumerate(tables.items()):
        for line, (metric, title) in enumerate(_PANELS):
            axes = grid[line][column]
            _bars(axes, table, metric)
            axes.set_ylabel(title if column == 0 else "")
            axes.grid(axis="y", alpha=0.3)
        _rooflines(grid[0][column], table, bits, rooflines)
        grid[0][column].set_title(bits)
        grid[-1][column].set_xlabel("streams")
    grid[0][0].legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes: "Axes", table: Sequence[Row], metric: str) -> None:
    names = list(dict.fromkeys(row.name for row in table))
    streams = sorted({row.streams for row in table})
    width = 0.8 / len(names)
    for idx, name in enumerate(names):
        found = [row for row in table if row.name == name]
        spreads = [row.metrics[metric] for row in found]
        places = [
            streams.index(row.streams) + (idx - (len(names) - 1) / 2) * width for row in found
        ]
        medians = [spread.median for spread in spreads]
        errors = [
            [spread.median - spread.low for spread in spreads],
            [spread.high - spread.median for spread in spreads],
        ]
        axes.bar(places, medians, width, yerr=errors, label=name, color=_COLORS.get(name))
    axes.set_xticks(range(len(streams)), [str(count) for count in streams])


def _rooflines(
    axes: "Axes", table: Sequence[Row], bits: str, rooflines: dict[tuple[str, int], float]
) -> None:
    for idx, streams in enumerate(sorted({row.streams for row in table})):
        if (best := rooflines.get((bits, streams))) is not None:
            axes.hlines(best, idx - 0.45, idx + 0.45, colors="black", linestyles="dashed")
