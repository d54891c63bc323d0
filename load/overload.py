"""Ten times what the server can do: goodput, how fast it refuses, and whether Retry-After is true.

    python -m shoal.load.overload --report load/reports/overload-served.md

Starts a server of its own. First as many clients as keep it full say what it can do; then requests
come at ten times that rate, whatever happens to them. Refused clients retry when they are told to.
"""

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.load.live_client import LiveClient, LiveRecord, LiveRequest, poisson
from shoal.load.live_server import MODEL, live_server, wait_idle
from shoal.load.process_cpu import cpu_between, cpu_seconds
from shoal.load.report import markdown_table
from shoal.load.scheduler_cost import cpu_name

CONCURRENCY = 16
QUEUE = 16


def main(
    port: Annotated[int, typer.Option(help="Of the server, and the three after it.")] = 19130,
    factor: Annotated[float, typer.Option(help="Times what it can do.")] = 10.0,
    seconds: Annotated[float, typer.Option(help="Of each of the two loads.")] = 30.0,
    patience_s: Annotated[float, typer.Option(help="The longest wait of a refused client.")] = 60.0,
    tail_s: Annotated[
        float, typer.Option(help="How long retries may go on after the load.")
    ] = 60.0,
    num_prompt: int = 100,
    num_outputs: int = 32,
    policy: str = "fcfs",
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Measure, print, and write a report if asked."""

    def make(draw: random.Random, at: float) -> LiveRequest:
        prompt = draw.randint(num_prompt // 2, num_prompt * 3 // 2)
        return LiveRequest(at, prompt, draw.randint(num_outputs // 2, num_outputs * 3 // 2))

    draw = random.Random(0)
    try:
        with live_server(
            port, policy=policy, max_num_seqs=CONCURRENCY, max_queued_requests=QUEUE
        ) as open_port:
            client = LiveClient(open_port, MODEL)
            asyncio.run(client.run_closed(lambda: make(draw, 0.0), CONCURRENCY, 5.0))  # warm up
            wait_idle(open_port)
            cpu = [cpu_seconds()]
            full = asyncio.run(
                client.run_closed(lambda: make(draw, 0.0), CONCURRENCY + QUEUE // 2, seconds)
            )
            cpu.append(cpu_seconds())
            wait_idle(open_port)
            rate = tokens_in(full, seconds / 4, seconds) / (0.75 * seconds) / num_outputs
            if not rate:
                sys.exit("error: the server gave no token in that time; take more --seconds.")
            requests = poisson("overload", factor * rate, seconds, make)
            cpu.append(cpu_seconds())
            over = asyncio.run(client.run(requests, patience_s, seconds + tail_s))
            cpu.append(cpu_seconds())
            spent_s = client.now
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    rows = [
        ("saturation, requests/s", f"{rate:.2f}"),
        ("offered, requests/s", f"{len(requests) / seconds:.2f}"),
        *_goodput_rows(full, over, seconds),
        *_refusal_rows(over),
    ]
    lines = markdown_table(("measure", "value"), rows)
    lines += ["", *_cpu_table(cpu, (seconds, spent_s))]
    print("\n".join(lines))
    if report is not None:
        _write(report, lines, policy, seconds, patience_s, num_prompt, num_outputs)


def tokens_in(records: Sequence[LiveRecord], start: float, end: float) -> float:
    """Output tokens that reached clients in a time, of requests that did not fail."""
    total = 0.0
    for record in records:
        if record.status == 200 and record.token_times:
            inside = sum(start <= at < end for at in record.token_times)
            whole = record.num_tokens or len(record.token_times)
            total += whole * inside / len(record.token_times)
    return total


def _goodput_rows(
    full: Sequence[LiveRecord], over: Sequence[LiveRecord], seconds: float
) -> list[tuple[str, str]]:
    warm = seconds / 4  # until slots and queue are full
    at_saturation = tokens_in(full, warm, seconds) / (seconds - warm)
    in_overload = tokens_in(over, warm, seconds) / (seconds - warm)
    return [
        ("output at saturation, tokens/s", f"{at_saturation:.1f}"),
        ("output in overload, tokens/s", f"{in_overload:.1f}"),
        ("goodput: overload / saturation", f"{in_overload / at_saturation:.1%}"),
    ]


def _refusal_rows(over: Sequence[LiveRecord]) -> list[tuple[str, str]]:
    answers = sorted(1000 * (end - start) for r in over for start, end, _ in r.refused)
    if not answers:
        return [("refusals", "0")]
    errors = []
    for record in over:
        if record.refused and record.status == 200 and record.first_token is not None:
            _, answered, told = record.refused[0]
            accepted = _accepted_at(record)
            errors.append(abs(told - (accepted - answered)) / max(1e-3, accepted - answered))
    rows = [
        ("refusals", f"{len(answers):,} of {sum(bool(r.refused) for r in over):,} requests"),
        (
            "refused after, ms, p50 / p90 / p99",
            " / ".join(f"{answers[int(q * (len(answers) - 1))]:.1f}" for q in (0.5, 0.9, 0.99)),
        ),
        ("refused clients that were served on a retry", f"{len(errors):,}"),
    ]
    if errors:
        errors.sort()
        rows.append(
            (
                "error of Retry-After, p50 / p90",
                f"{statistics.median(errors):.1%} / {errors[int(0.9 * (len(errors) - 1))]:.1%}",
            )
        )
    return rows


def _cpu_table(cpu: Sequence[dict[str, float]], seconds: tuple[float, float]) -> list[str]:
    """Cores that each process had. ``cpu``: before and after each load."""
    loads = [cpu_between(*cpu[:2]), cpu_between(*cpu[2:])]
    rows = [
        (name, *(f"{load.get(name, 0.0) / s:.2f}" for load, s in zip(loads, seconds, strict=True)))
        for name in loads[1]
    ]
    return markdown_table(("cores of", "at saturation", "in overload and after"), rows)


def _accepted_at(record: LiveRecord) -> float:
    """When the retry that was accepted was sent: as it was told the last time."""
    _, answered, told = record.refused[-1]
    return answered + told


def _write(
    path: Path,
    lines: list[str],
    policy: str,
    seconds: float,
    patience_s: float,
    num_prompt: int,
    num_outputs: int,
) -> None:
    head = f"""# Overload, on the real server

`python -m shoal.load.overload --report {path}` makes this page: SmolLM2-135M behind Triton and the
OpenAI endpoint, client and server on one machine ({cpu_name()}).

Policy {policy}, {CONCURRENCY} slots, a queue of {QUEUE}. Prompts of {num_prompt // 2} to
{num_prompt * 3 // 2} random tokens, {num_outputs // 2} to {num_outputs * 3 // 2} outputs;
{seconds:g} s of each load. Tokens count when they reach a client, after the first quarter.
Clients keep their connections, as the official ones do.
A refused client retries when it is told to, if that is at most {patience_s:g} s away. The error of
Retry-After is |told − wait| / wait: what it was told first, against the wait from then until its
accepted try.
"""
    path.write_text(head + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
