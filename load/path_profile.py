"""What each process on a token's way costs: CPU time a token and a request, on the real server.

    python load/path_profile.py [--port 9000] [--only real|noop] [--report FILE] [--title TEXT]

Serves a model of one tiny layer and then SmolLM2-135M (bf16), each under closed-loop load over the
OpenAI endpoint and over gRPC; and runs the engine alone under the load that the real model has.
With --report the table is put into a page, under its title, beside those of other times.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.live_server import live_server, wait_idle
from shoal.load.noop_model import write_noop_model
from shoal.load.path_bench import LONG, SHORT, SHORT_STREAMED, WARM_UP
from shoal.load.path_client import PathLoad, PathResult
from shoal.load.path_runs import ROLE_NAMES, PathRun, run_client, run_module
from shoal.load.report import markdown_table

REAL = PathLoad(streams=32, requests=96, max_tokens=128, prompt_tokens=128, ids=True)
NOOP_CASES = {
    "one tiny layer, 64 streams × 256, OpenAI": ("http", LONG),
    "one tiny layer, 64 streams × 256, gRPC": ("grpc", LONG),
    "one tiny layer, short, OpenAI": ("http", SHORT),
    "one tiny layer, short, OpenAI, streamed": ("http", SHORT_STREAMED),
}
Count = Callable[[PathResult], int]  # what a run's cost is divided by
HEAD = """# The path's profile

`python load/path_profile.py` measures: CPU microseconds of each process, from /proc, divided by the
tokens (long answers) or requests (short ones, of 8 tokens) of the run. Client and server share two
cores. The worker's part of the real model is the model's own work."""


def main(
    port: Annotated[int, typer.Option(help="The first of four.")] = 9000,
    only: Annotated[str | None, typer.Option(help="real or noop")] = None,
    shim_workers: int = 1,
    report: Annotated[Path | None, typer.Option(help="Put it into this page.")] = None,
    title: Annotated[str, typer.Option(help="Of the table in the page.")] = "Now",
) -> None:
    """Print a table; with --report also put it into a page."""
    flags = [f"--shim-workers={shim_workers}"] if shim_workers != 1 else []
    lines: list[str] = []
    if only != "real":
        lines += noop_lines(port, flags)
    if only != "noop":
        lines += real_lines(port, flags)
    print("\n".join(lines))
    if report is not None:
        put_section(report, title, lines)


def noop_lines(port: int, flags: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="shoal-path-") as folder:
        weights = write_noop_model(Path(folder) / "noop")
        with live_server(port, *flags, weights=str(weights), num_kv_blocks=4096) as openai_port:
            run_client("http", openai_port, WARM_UP)
            run_client("grpc", openai_port + 2, WARM_UP)
            runs = {}
            for name, (kind, load) in NOOP_CASES.items():
                wait_idle(openai_port)
                runs[name] = run_client(kind, openai_port + (0 if kind == "http" else 2), load)
    tokens = {name: run for name, run in runs.items() if "short" not in name}
    requests = {name: run for name, run in runs.items() if "short" in name}
    return [
        *cost_table("CPU µs a token", tokens, lambda result: result.num_tokens),
        "",
        *cost_table("CPU µs a request", requests, lambda result: result.num_requests),
        "",
    ]


def real_lines(port: int, flags: list[str]) -> list[str]:
    with live_server(port, *flags, dtype="bfloat16") as openai_port:
        run_client("http", openai_port, WARM_UP)
        run = run_client("http", openai_port, REAL)
    alone = run_module("shoal.load.path_engine")
    change = run.result.tokens_per_s / alone.tokens_per_s - 1
    return [
        *cost_table(
            "CPU µs a token", {"SmolLM2-135M bf16, 32 × (128 + 128)": run}, lambda r: r.num_tokens
        ),
        "",
        f"The engine alone gives {alone.tokens_per_s:.0f} tokens/s at that load "
        f"({1e6 * alone.cpu_s / alone.num_tokens:.0f} CPU µs a token); over Triton and the OpenAI",
        f"endpoint, the client beside it, {run.result.tokens_per_s:.0f}: {100 * change:+.1f} %.",
        "",
    ]


def cost_table(what: str, runs: dict[str, PathRun], count: Count) -> list[str]:
    """A row a run, a column a process."""
    rows = []
    for name, run in runs.items():
        costs = [1e6 * run.cpu_s.get(role, 0.0) / count(run.result) for role in ROLE_NAMES]
        cells = [f"{cost:.0f}" for cost in (*costs, sum(costs))]
        rows.append((name, *cells, f"{count(run.result) / run.result.seconds:.0f}"))
    return markdown_table((what, *ROLE_NAMES, "all", "a second"), rows)


def put_section(page: Path, title: str, lines: list[str]) -> None:
    """Replace the section of that title, or add it at the end."""
    text = page.read_text() if page.exists() else HEAD
    head, *sections = text.rstrip("\n").split("\n\n## ")
    section = "\n".join([title, "", *lines]).rstrip("\n")
    kept = [part for part in sections if part.split("\n", 1)[0] != title]
    page.write_text("\n\n## ".join([head, *kept, section]) + "\n")


if __name__ == "__main__":
    typer.run(main)
