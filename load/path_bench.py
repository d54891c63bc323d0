"""What the way through Triton and the OpenAI endpoint leaves of a model that costs nothing.

    python load/path_bench.py [--port 9000] [--rounds 3] [--shim-workers 1] [--report FILE]

Makes a model of one tiny random layer, serves it, and sends the same requests over the OpenAI
endpoint and over Triton's gRPC in turn, then short requests over the endpoint. Server and clients
share the machine.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.live_server import live_server, wait_idle
from shoal.load.noop_model import write_noop_model
from shoal.load.path_client import PathLoad
from shoal.load.path_runs import PathRun, run_client
from shoal.load.report import markdown_table

LONG = PathLoad(streams=64, requests=256, max_tokens=256)
SHORT = PathLoad(streams=128, requests=2000, max_tokens=8, stream=False)
SHORT_STREAMED = PathLoad(streams=128, requests=2000, max_tokens=8)
CASES = {
    "64 streams × 256, OpenAI": ("http", LONG),
    "64 streams × 256, gRPC": ("grpc", LONG),
    "short, OpenAI": ("http", SHORT),
    "short, OpenAI, streamed": ("http", SHORT_STREAMED),
}
WARM_UP = PathLoad(streams=8, requests=32, max_tokens=8)


def main(
    port: Annotated[int, typer.Option(help="The first of four.")] = 9000,
    rounds: int = 3,
    shim_workers: int = 1,
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Print a table; with --report also write it."""
    runs = measure(port, rounds, shim_workers)
    lines = report_lines(runs, rounds, shim_workers)
    text = "\n".join(lines)
    print(text)
    if report is not None:
        report.write_text(text + "\n")


def measure(port: int, rounds: int, shim_workers: int) -> dict[str, list[PathRun]]:
    """The runs of each case, in turn."""
    runs: dict[str, list[PathRun]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory(prefix="shoal-path-") as folder:
        weights = write_noop_model(Path(folder) / "noop")
        flags = [f"--shim-workers={shim_workers}"] if shim_workers != 1 else []
        with live_server(port, *flags, weights=str(weights), num_kv_blocks=4096) as openai_port:
            for kind in ("http", "grpc"):
                run_client(kind, _port(openai_port, kind), WARM_UP)
            for number in range(rounds):
                for name, (kind, load) in CASES.items():
                    wait_idle(openai_port)
                    runs[name].append(run_client(kind, _port(openai_port, kind), load, number))
    return runs


def _port(openai_port: int, kind: str) -> int:
    return openai_port if kind == "http" else openai_port + 2


def report_lines(runs: dict[str, list[PathRun]], rounds: int, shim_workers: int) -> list[str]:
    long_http, long_grpc, *_ = (
        statistics.median(run.result.tokens_per_s for run in of_case) for of_case in runs.values()
    )
    rows = [(name, *_row(of_case)) for name, of_case in runs.items()]
    header = ("load", "tokens/s", "requests/s", "mean latency, ms", "p99, ms", "TTFT p50, ms")
    return [
        "# The path around a model that costs nothing",
        "",
        "`python load/path_bench.py` makes this page: a model of one tiny random layer, server and",
        f"clients on the same {_num_cores()} cores, {shim_workers} shim process"
        + ("es" if shim_workers != 1 else "")
        + f". Medians of {rounds} interleaved rounds (range).",
        "",
        *markdown_table(header, rows),
        "",
        f"Over the OpenAI endpoint the 64 streams get {long_http / long_grpc:.2f} of the tokens/s",
        "that they get over gRPC, a stream a request. Short requests have 8 tokens, 128 at a time.",
    ]


def _row(runs: list[PathRun]) -> tuple[str, ...]:
    results = [run.result for run in runs]
    return (
        _spread([result.tokens_per_s for result in results]),
        _spread([result.requests_per_s for result in results]),
        _spread([result.mean_ms for result in results]),
        _spread([result.p99_ms for result in results]),
        _spread([result.ttft_p50_ms for result in results]),
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}–{max(values):.0f})"


def _num_cores() -> int:
    from shoal.backend.machine import num_usable_cpus

    return num_usable_cpus()


if __name__ == "__main__":
    typer.run(main)
