"""Simulate the server in virtual time, and fit how long a step takes.

python load/simulate.py list
python load/simulate.py run azure --report load/reports/azure-fcfs.md
python load/simulate.py fit steps.jsonl --out load/fits/mine.json --source "where it ran"
"""

import cProfile
import pstats
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.measures import summarize
from shoal.load.records import SimulationResult
from shoal.load.report import ReportContext, make_console, print_summary, write_report
from shoal.load.simulation import Simulation, SimulationConfig, WorkerSettings, saturation_rate
from shoal.load.step_cost import DEFAULT_FIT, StepCostFit, fit_step_cost, read_step_log
from shoal.load.workload import Workload, chain
from shoal.load.workloads import WORKLOADS, WorkloadOptions

PROFILE_LINES = 25

app = typer.Typer(add_completion=False, no_args_is_help=True, help=(__doc__ or "").split("\n")[0])


@app.command("list")
def list_workloads() -> None:
    """Name the workloads."""
    for name, make in WORKLOADS.items():
        typer.echo(f"{name:20}{(make.__doc__ or '').splitlines()[0]}")


@app.command()
def fit(
    log: Annotated[Path, typer.Argument(help="A step log of the engine (JSON lines).")],
    out: Annotated[Path | None, typer.Option(help="Save the fit there.")] = None,
    source: Annotated[str, typer.Option(help="Machine, model and date, kept in the file.")] = "",
) -> None:
    """Fit the step cost to a measured step log."""
    try:
        fitted = fit_step_cost(read_step_log(log), source)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    cost = fitted.cost
    typer.echo(f"{fitted.num_steps} steps, {fitted.num_outliers} of them left out as outliers")
    typer.echo(f"relative error: median {fitted.median_error:.1%}, p90 {fitted.p90_error:.1%}")
    typer.echo(
        f"t = {cost.base * 1e3:.3f} ms"
        f" + {cost.per_prefill_token * 1e3:.4f} ms x prefill tokens"
        f" + {cost.per_decode_seq * 1e3:.4f} ms x decodes"
        f" + {cost.per_context_token * 1e6:.3f} us x context tokens"
        f" + {cost.per_prefill_pair * 1e9:.3f} ns x prefill pairs"
    )
    if out is not None:
        fitted.save(out)
        typer.echo(f"saved to {out}")


@app.command()
def run(
    workload: Annotated[str, typer.Argument(help="One of those that `list` names.")],
    policy: Annotated[str, typer.Option(help="The dispatcher's policy.")] = "fcfs",
    seed: int = 0,
    requests: Annotated[int | None, typer.Option(help="How many; default: its own.")] = None,
    load: Annotated[
        float | None, typer.Option(help="Share of the capacity that is asked for.")
    ] = None,
    length_divisor: Annotated[float, typer.Option(help="Of the traces' lengths.")] = 16.0,
    time_factor: Annotated[
        float | None, typer.Option(help="Of the traces' times; default: what gives the load.")
    ] = None,
    workers: int = 1,
    num_blocks: Annotated[int, typer.Option(help="KV blocks of a worker.")] = 1456,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    max_queued_requests: int = 1024,
    prefix_eviction: Annotated[
        str, typer.Option(help="Of the prefix cache: reuse, lru, lfu; none: no cache.")
    ] = "reuse",
    max_retries: Annotated[
        int, typer.Option(help="How often a refused client comes back, after its Retry-After.")
    ] = 0,
    timeout_s: Annotated[
        float | None, typer.Option(help="Of every request, told to the server.")
    ] = None,
    fit_file: Annotated[Path, typer.Option("--fit", help="Step cost.")] = DEFAULT_FIT,
    report: Annotated[Path | None, typer.Option(help="Write Markdown and plots there.")] = None,
    profile: Annotated[bool, typer.Option(help="Show where the time went.")] = False,
) -> None:
    """Simulate one workload and show what came of it."""
    try:
        step_fit = StepCostFit.load(fit_file)
        config = SimulationConfig(
            cost=step_fit.cost,
            worker=WorkerSettings(
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=min(WorkerSettings().max_model_len, 16 * num_blocks),
                prefix_eviction=prefix_eviction,
            ),
            num_workers=workers,
            max_queued_requests=max_queued_requests,
            max_retries=max_retries,
            policy=policy,
        )
        options = WorkloadOptions(
            capacity=partial(saturation_rate, config),
            seed=seed,
            num_requests=requests,
            load=load,
            length_divisor=length_divisor,
            time_factor=time_factor,
        )
        made = _make(workload, options)
        for opening in made.requests:
            for request in chain(opening):
                request.timeout_s = timeout_s
        simulation = Simulation(made, config)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    result, seconds = _run(simulation, profile)
    summary = summarize(result)
    console = make_console()
    print_summary(summary, f"{made.name}, {policy}: {made.description}", console)
    rate = 60 * len(result.records) / seconds
    console.print(f"simulated in {seconds:.1f} s: {rate:,.0f} requests a minute")
    if report is not None:
        context = ReportContext(
            f"{made.name} under {policy}", _command(), _facts(config, step_fit, seed, timeout_s)
        )
        try:
            written = write_report(report, result, summary, context)
        except ImportError:
            sys.exit("error: a report needs matplotlib: pip install 'shoal-llm[load]'.")
        console.print("wrote " + ", ".join(str(path) for path in written))


def _make(name: str, options: WorkloadOptions) -> Workload:
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}. There are: {', '.join(WORKLOADS)}.")
    return WORKLOADS[name](options)


def _run(simulation: Simulation, profile: bool) -> tuple[SimulationResult, float]:
    profiler = cProfile.Profile() if profile else None
    start = time.perf_counter()
    result = profiler.runcall(simulation.run) if profiler else simulation.run()
    seconds = time.perf_counter() - start
    if profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(PROFILE_LINES)
    return result, seconds


def _command() -> str:
    return "python load/simulate.py " + shlex.join(sys.argv[1:])


def _facts(
    config: SimulationConfig, step_fit: StepCostFit, seed: int, timeout_s: float | None
) -> list[tuple[str, str]]:
    worker, cost, latencies = config.worker, config.cost, config.latencies
    return [
        ("policy", config.policy),
        ("seed", str(seed)),
        (
            "workers",
            f"{config.num_workers}, each with {worker.num_blocks} blocks of {worker.block_size} "
            f"tokens, {worker.max_num_seqs} sequences, {worker.max_num_batched_tokens} tokens a "
            f"step, context of {worker.max_model_len}",
        ),
        ("queue", f"{config.max_queued_requests} requests"),
        ("timeout of a request", "none" if timeout_s is None else f"{timeout_s:g} s"),
        ("retries of a refused client", str(config.max_retries)),
        (
            "latencies",
            f"intake {latencies.intake * 1e3:g} ms, to worker {latencies.to_worker * 1e3:g} ms, "
            f"from worker {latencies.from_worker * 1e3:g} ms, "
            f"to client {latencies.to_client * 1e3:g} ms",
        ),
        (
            "step",
            f"{cost.base * 1e3:.2f} ms + {cost.per_prefill_token * 1e3:.3f} ms/prefill token + "
            f"{cost.per_decode_seq * 1e3:.3f} ms/decode + "
            f"{cost.per_context_token * 1e6:.2f} µs/context token + "
            f"{cost.per_prefill_pair * 1e9:.1f} ns/prefill pair",
        ),
        (
            "fitted to",
            f"{step_fit.source}; {step_fit.num_steps} steps, median error "
            f"{step_fit.median_error:.1%}",
        ),
    ]


if __name__ == "__main__":
    app()
