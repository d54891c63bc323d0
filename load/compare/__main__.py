"""Us and our peers on this machine, one command: measured in turns, and a page of it.

    python -m shoal.load.compare [--bits bf16,int8,int4] [--model smollm2] [--rounds 3]
        [--peers llama.cpp,vllm,openvino] [--streams 1,8,32] [--folder ~/peers] [--report-only]

Every result is written down as it comes, so the same command goes on where it was stopped, and
--report-only builds the page from what there is. load/README.md says how peers are installed.
"""

import datetime
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.compare.contenders import BITS, PEERS
from shoal.load.compare.records import Case, Journal
from shoal.load.compare.report import write_report
from shoal.load.compare.rounds import Comparison, cases_for
from shoal.load.compare.servers import leave_on_sigterm

DEFAULT_FOLDER = Path("~/peers")
REPORTS = Path(__file__).parents[1] / "reports"


def main(
    model: Annotated[str, typer.Option(help="smollm2 or gemma3.")] = "smollm2",
    bits: Annotated[str, typer.Option(help="Any of bf16, int8, int4.")] = ",".join(BITS),
    peers: Annotated[str, typer.Option(help="Whom to compare with.")] = ",".join(PEERS),
    streams: Annotated[str, typer.Option(help="How many requests at once.")] = "1,8,32",
    rounds: int = 3,
    requests: Annotated[
        str | None, typer.Option(help="For each of the streams, if not 4, 16, 64.")
    ] = None,
    repeat: Annotated[bool, typer.Option(help="Also prompts sent twice.")] = True,
    folder: Annotated[
        Path, typer.Option(envvar="SHOAL_PEERS", help="Where the peers are.")
    ] = DEFAULT_FOLDER,
    port: Annotated[int, typer.Option(help="Of the servers, and the three after it.")] = 19140,
    journal: Annotated[
        Path | None, typer.Option(help="Results; default: beside the report.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Default: load/reports/cpu-DATE.md.")] = None,
    report_only: bool = False,
) -> None:
    """Measure what is missing in the journal, then write the report."""
    page = report or REPORTS / f"cpu-{datetime.date.today().isoformat()}.md"
    results = Journal(journal or page.with_suffix(".jsonl"))
    where = folder.expanduser().absolute()
    leave_on_sigterm()
    if not report_only:
        comparison = Comparison(results, where, port)
        comparison.run(
            model,
            _choose("bits", bits, BITS),
            _choose("peers", peers, PEERS),
            _cases(streams, requests, repeat),
            rounds,
        )
    if not results.records:
        sys.exit("error: nothing is measured yet.")
    write_report(results.records, where, page)
    print(f"written: {os.path.relpath(page)}")


def _choose(name: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(part for part in text.split(",") if part)
    if unknown := [part for part in chosen if part not in allowed]:
        sys.exit(f"error: --{name} has {unknown[0]!r}; allowed: {', '.join(allowed)}.")
    return chosen


def _cases(streams: str, requests: str | None, repeat: bool) -> list[Case]:
    try:
        counts = [int(part) for part in streams.split(",") if part]
        numbers = [int(part) for part in requests.split(",")] if requests else None
        return cases_for(counts, numbers, repeat)
    except ValueError as error:
        sys.exit(f"error: --streams and --requests: {error}.")


if __name__ == "__main__":
    typer.run(main)
