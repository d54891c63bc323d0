"""Random requests after the server's own OpenAPI page: no 5xx, no slow answer, no odd shape.

    python -m shoal.load.api_fuzz http://127.0.0.1:9000 --examples 50 --seeds 1 2

Every request carries a deadline (``x-shoal-timeout``), as random ones may ask for more tokens than
can be made in time; that the server keeps it is part of what is tried. Needs schemathesis (of the
``dev`` extra). Ends with 1 where a check failed or a request got no answer.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, repeat
from pathlib import Path

CHECKS = (
    "not_a_server_error",
    "response_schema_conformance",
    "status_code_conformance",
    "content_type_conformance",
    "whole_answer_in_time",
)
MAX_RESPONSE_S = 5.0
LOG_VARIABLE = "SHOAL_FUZZ_LOG"  # the file for what the hooks see
DEADLINE_MS = 2000
PATIENCE_S = 2 * MAX_RESPONSE_S  # of the client for one read
NUM_SLOWEST = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One request and what came of it. ``status`` None: no answer."""

    operation: str
    status: int | None
    seconds: float
    body: str = ""  # its beginning

    @property
    def failed(self) -> bool:
        return self.status is None or self.status >= 500 or self.seconds > MAX_RESPONSE_S


def command(
    url: str,
    examples: int,
    key: str | None = None,
    seed: int = 1,
    phases: str = "examples,coverage,fuzzing",
    workers: int = 1,
) -> list[str]:
    """The command line of one run. ``coverage`` takes hundreds of requests whatever the number of
    examples."""
    tool = Path(sys.executable).parent / "schemathesis"
    line = [str(tool), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)]
    line += ["--request-timeout", str(PATIENCE_S), "--max-examples", str(examples)]
    line += ["--seed", str(seed), "--phases", phases, "--workers", str(workers)]
    line += ["--header", f"X-Shoal-Timeout: {DEADLINE_MS}", "--continue-on-failure"]
    # Half of the inputs are wrong on purpose.
    line += ["--mode", "all", "--generation-database", "none", "--no-color"]
    return line if key is None else [*line, "--header", f"Authorization: Bearer {key}"]


def environment(log: Path) -> dict[str, str]:
    """What a run needs beside its command line; ``log`` gets a line a request."""
    hooks = {"SCHEMATHESIS_HOOKS": "shoal.load.api_fuzz_hooks", LOG_VARIABLE: str(log)}
    return {**os.environ, **hooks}


def read_calls(log: Path) -> list[Call]:
    """The calls of a run; none where it made none."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [Call(**json.loads(line)) for line in lines]


def slowest(calls: Sequence[Call]) -> list[Call]:
    """Some of them, the slowest first."""
    return sorted(calls, key=lambda call: -call.seconds)[:NUM_SLOWEST]


def report(
    calls: Sequence[Call], seeds: Iterable[int], examples: int, workers: int, ended: bool
) -> str:
    """The figures as Markdown. ``ended``: whether schemathesis had nothing to say."""
    statuses = Counter(str(call.status or "no answer") for call in calls)
    names = sorted({call.operation for call in calls})
    rows = [_row(name, [call for call in calls if call.operation == name]) for name in names]
    versions = ", ".join(f"{name} {version(name)}" for name in ("shoal-llm", "schemathesis"))
    lines = [
        "# Random requests after the OpenAPI page",
        "",
        f"`python -m shoal.load.api_fuzz URL --examples {examples} --seeds "
        f"{' '.join(map(str, seeds))} --workers {workers}` against `shoal serve` with its default "
        f"model, client and server on one machine ({platform.machine()}, {os.cpu_count()} CPUs). "
        f"{workers} requests at once, each with a deadline of {DEADLINE_MS} ms. {versions}, Python "
        f"{platform.python_version()}.",
        "",
        f"{len(calls)} requests to {len(names)} operations; "
        f"{sum(call.failed for call in calls)} with a 5xx, no answer or one that took over "
        f"{MAX_RESPONSE_S:g} s; schemathesis's checks {'all passed' if ended else 'FAILED'}.",
        "",
        "Answers by status: "
        + ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
        + ".",
        "",
        "| operation | requests | 2xx | 408 | other 4xx | median, s | slowest, s |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "The slowest: "
        + ", ".join(
            f"{call.seconds:.2f} s ({call.operation}, {call.status})" for call in slowest(calls)
        )
        + ".",
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, calls: Sequence[Call]) -> str:
    kinds = Counter(_kind(call.status) for call in calls)
    seconds = sorted(call.seconds for call in calls)
    cells = [name, str(len(calls)), *(str(kinds[kind]) for kind in ("2xx", "408", "4xx"))]
    cells += [f"{seconds[len(seconds) // 2]:.3f}", f"{seconds[-1]:.2f}"]
    return f"| {' | '.join(cells)} |"


def _kind(status: int | None) -> str:
    return "408" if status == 408 else f"{(status or 500) // 100}xx"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="of the OpenAI API, without /v1")
    parser.add_argument("--examples", type=int, default=100, help="of each endpoint")
    parser.add_argument("--key")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    parser.add_argument("--workers", type=int, default=1, help="requests at once")
    parser.add_argument("--report", type=Path, help="a file for the figures")
    flags = parser.parse_args()
    # The other phases ask the same whatever the seed.
    all_phases = chain([flags.phases], repeat("fuzzing,stateful"))
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as name:
        log = Path(name) / "calls.jsonl"
        codes = [
            subprocess.run(
                command(flags.url, flags.examples, flags.key, seed, phases, flags.workers),
                env=environment(log),
                check=False,
            ).returncode
            for seed, phases in zip(flags.seeds, all_phases, strict=False)
        ]
        calls = read_calls(log)
    text = report(calls, flags.seeds, flags.examples, flags.workers, not any(codes))
    print(text)
    for call in slowest(calls):
        print(f"{call.seconds:.2f} s, {call.operation}, {call.status}: {call.body}")
    for call in filter(lambda call: call.failed, calls):
        print(f"FAILED: {call.operation}, {call.status}, {call.seconds:.2f} s: {call.body}")
    if flags.report is not None:
        flags.report.write_text(text)
    return 1 if any(codes) or not calls or any(call.failed for call in calls) else 0


if __name__ == "__main__":
    sys.exit(main())
