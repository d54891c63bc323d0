"""Benchmark: what the pure Python of scheduler and dispatcher costs, in CPU time of one thread.

python load/scheduler_cost.py --report load/reports/scheduler-cost.md
"""

import gc
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.table import Table

from shoal.load.report import make_console, markdown_table
from shoal.load.simulation import SimulationConfig, WorkerSettings, default_dispatcher
from shoal.load.step_cost import StepCost
from shoal.load.workload import Workload
from shoal.scheduler.dispatched import Add
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import FinishReason, Sequence

NUM_REPEATS = 21
STEPS_PER_REPEAT = 100
REQUESTS_PER_REPEAT = 500
PROMPT_TOKENS = 256
TOKEN = SampledToken(7)
SCHEDULER_TARGET_US = 15.0  # per running sequence, at 64 of them
DISPATCHER_TARGET_US = 50.0  # per request

_HEADER = ("what", "median, µs", "best, µs", "worst, µs", "target, µs")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Microseconds per unit, one value a repeat."""

    what: str
    samples: tuple[float, ...]
    target: float | None = None

    @property
    def row(self) -> tuple[str, ...]:
        values = (median(self.samples), min(self.samples), max(self.samples))
        target = "" if self.target is None else f"≤ {self.target:g}"
        return (self.what, *(f"{value:.2f}" for value in values), target)


def measure(repeats: Iterator[Callable[[], int]]) -> tuple[float, ...]:
    """Run each repeat, which returns its number of units. The first warms up and is left out."""
    samples = []
    gc.collect()
    for repeat in repeats:
        start = time.process_time_ns()
        num_units = repeat()
        samples.append((time.process_time_ns() - start) / 1000 / num_units)
    return tuple(samples[1:])


def scheduler_cost(num_seqs: int) -> tuple[float, ...]:
    """schedule + update_from_output of decode steps, per running sequence."""
    num_prefill_steps = num_seqs  # at most: no two chunks of 512 tokens are needed for one prompt
    num_steps = NUM_REPEATS * STEPS_PER_REPEAT + num_prefill_steps
    num_tokens = PROMPT_TOKENS + num_steps + 1
    settings = WorkerSettings(
        num_blocks=num_seqs * (num_tokens // 16 + 2),
        max_num_seqs=num_seqs,
        max_model_len=num_tokens + 1,
    )
    scheduler = settings.make_scheduler()
    sampling = SamplingParams(max_tokens=num_steps + 100, ignore_eos=True, seed=0)
    sequences = [
        Sequence(seq_id, [1] * PROMPT_TOKENS, PROMPT_TOKENS, sampling) for seq_id in range(num_seqs)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    while any(sequence.num_output_tokens == 0 for sequence in sequences):  # prefill
        step(scheduler)

    def repeat() -> int:
        for _ in range(STEPS_PER_REPEAT):
            step(scheduler)
        return STEPS_PER_REPEAT * num_seqs

    return measure(repeat for _ in range(NUM_REPEATS))


def step(scheduler: Scheduler) -> list[StepOutput]:
    """A step without a model. Its token dict is the runner's work, but too little to matter."""
    output = scheduler.schedule()
    sampled = {item.sequence.seq_id: TOKEN for item in output.scheduled if item.samples}
    return scheduler.update_from_output(output, sampled)


def dispatcher_cost(policy: str, num_output_tokens: int) -> tuple[float, ...]:
    """A request's whole way: add, poll, its outputs one by one, each with a status and a poll.

    64 requests are on the worker and the others queued, as on a busy server.
    """
    dispatcher = make_dispatcher(policy)
    numbers = iter(range(10**9))

    def repeat() -> int:
        run_requests(dispatcher, numbers, num_output_tokens)
        return REQUESTS_PER_REPEAT

    return measure(repeat for _ in range(NUM_REPEATS))


def make_dispatcher(policy: str) -> Dispatcher:
    settings = WorkerSettings(num_blocks=4096)
    config = SimulationConfig(
        StepCost(0.0, 0.0, 0.0), worker=settings, max_queued_requests=10_000, policy=policy
    )
    dispatcher = default_dispatcher(config, Workload("none", "", []))
    dispatcher.worker_ready(1, settings.capacity)
    return dispatcher


def run_requests(dispatcher: Dispatcher, numbers: Iterator[int], num_output_tokens: int) -> None:
    """Bring a batch of requests through, in steps of all that are on the worker."""
    prompt = list(range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=num_output_tokens, seed=0)
    num_given: dict[int, int] = {}
    for _ in range(REQUESTS_PER_REPEAT):
        dispatcher.add(next(numbers), prompt, sampling, 0.0)
        start_those_sent(dispatcher, num_given)
    while num_given:
        outputs = []
        for seq_id, given in tuple(num_given.items()):
            is_last = given + 1 == num_output_tokens
            reason = FinishReason.LENGTH if is_last else None
            outputs.append(StepOutput(seq_id, given, TOKEN, reason))
            num_given[seq_id] = given + 1
            if is_last:
                del num_given[seq_id]
        dispatcher.outputs(1, outputs, 0.0)
        dispatcher.worker_status(1, 4096, len(num_given), 0, 1)
        start_those_sent(dispatcher, num_given)


def start_those_sent(dispatcher: Dispatcher, num_given: dict[int, int]) -> None:
    for command in dispatcher.poll(0.0):
        if isinstance(command, Add):
            num_given[command.sequence.seq_id] = 0


def measure_all(policy: str) -> list[Measurement]:
    """All of them, the smallest first."""
    results = [
        Measurement(
            f"schedule + update, per running sequence at {num_seqs}",
            scheduler_cost(num_seqs),
            SCHEDULER_TARGET_US if num_seqs == 64 else None,
        )
        for num_seqs in (1, 8, 64, 256)
    ]
    whole = dispatcher_cost(policy, 1)
    many = dispatcher_cost(policy, 33)
    results.append(
        Measurement(f"dispatcher ({policy}), per request of one token", whole, DISPATCHER_TARGET_US)
    )
    further = tuple((b - a) / 32 for a, b in zip(whole, many, strict=True))
    results.append(Measurement(f"dispatcher ({policy}), per further token", further))
    return results


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_report(path: Path, results: list[Measurement], policy: str) -> None:
    text = "\n".join(
        [
            "# What scheduler and dispatcher cost",
            "",
            "CPU time of one thread, so that other work on the machine disturbs it little. "
            f"{NUM_REPEATS - 1} repeats after one to warm up, each of {STEPS_PER_REPEAT} steps "
            f"or {REQUESTS_PER_REPEAT} requests; prompts of {PROMPT_TOKENS} tokens.",
            "",
            f"{cpu_name()}, Python {platform.python_version()}. Repeat it with",
            "",
            f"    python load/scheduler_cost.py --policy {policy} --report {path}",
            "",
            *markdown_table(_HEADER, [result.row for result in results]),
            "",
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(
    policy: Annotated[str, typer.Option(help="The dispatcher's policy.")] = "fcfs",
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Measure, print a table, and write a report if asked."""
    try:
        results = measure_all(policy)
    except ValueError as error:
        sys.exit(f"error: {error}")
    table = Table(title=f"{cpu_name()}, Python {platform.python_version()}")
    for column in _HEADER:
        table.add_column(column)
    for result in results:
        table.add_row(*result.row)
    make_console().print(table)
    if report is not None:
        write_report(report, results, policy)


if __name__ == "__main__":
    typer.run(main)
