"""Rounds of measurements: in each, every contender is started, measured and ended in its turn."""

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.backend.machine import num_usable_cpus
from shoal.load.compare.client import ClosedLoop, Repeats
from shoal.load.compare.contenders import (
    Contender,
    MissingError,
    checkpoint,
    contenders,
    launch,
    version,
)
from shoal.load.compare.limits import Limits
from shoal.load.compare.records import (
    REPEAT,
    Case,
    Journal,
    Machine,
    MachineLimits,
    Measured,
    Repeated,
    Skipped,
)
from shoal.load.compare.servers import ServerError, running
from shoal.load.scheduler_cost import cpu_name

CLIENT_TIMEOUT_S = 900.0
REPEAT_CASE = Case(REPEAT, 4, num_prompt=512, num_outputs=4)


class CaseError(Exception):
    """A case that gave no result; says why."""


def cases_for(streams: Sequence[int], requests: Sequence[int] | None, repeat: bool) -> list[Case]:
    """By default two requests a stream, and four of a single one. Raises ValueError."""
    numbers = list(requests) if requests else [max(4, 2 * count) for count in streams]
    if len(numbers) != len(streams) or min([*streams, *numbers], default=0) < 1:
        raise ValueError("one positive number of requests for each positive number of streams")
    cases = [Case(count, number) for count, number in zip(streams, numbers, strict=True)]
    return [*cases, REPEAT_CASE] if repeat else cases


class Comparison:
    """Fills a journal."""

    def __init__(self, journal: Journal, folder: Path, port: int) -> None:
        self._journal = journal
        self._folder = folder
        self._port = port

    def run(
        self,
        model: str,
        bits: tuple[str, ...],
        peers: tuple[str, ...],
        cases: Sequence[Case],
        rounds: int,
    ) -> None:
        """All that the journal lacks."""
        if not self._journal.records:
            versions = {name: version(name, self._folder) for name in peers}
            today = datetime.date.today().isoformat()
            self._journal.append(Machine(today, cpu_name(), num_usable_cpus(), versions))
        for number in range(1, rounds + 1):
            if not self._journal.has_limits(number):
                load = os.getloadavg()[0]
                self._journal.append(MachineLimits(number, measure_limits(), load))
            for contender in contenders(model, bits, peers):
                if pending := self._journal.pending(number, contender, cases):
                    self._measure(number, contender, pending)

    def _measure(self, number: int, contender: Contender, cases: Sequence[Case]) -> None:
        key = (number, contender.name, contender.model, contender.bits)
        print(f"round {number}: {contender.name}, {contender.model}, {contender.bits}", flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-compare-") as name:
                work = Path(name)
                start = launch(contender, self._folder, self._port, work)
                load, began = os.getloadavg()[0], time.monotonic()
                with running(start, self._port, work / "server.log"):
                    ready_s = round(time.monotonic() - began, 1)
                    for case in cases:
                        output = self._run_client(contender.model, start.served_name, case)
                        if case.streams == REPEAT:
                            repeats = msgspec.json.decode(output, type=Repeats)
                            self._journal.append(Repeated(*key, repeats))
                            _show(repeats)
                        else:
                            loop = msgspec.json.decode(output, type=ClosedLoop)
                            self._journal.append(Measured(*key, loop, ready_s, load))
                            _show(loop)
        except (MissingError, ServerError, CaseError) as error:
            print(f"  skipped: {error}", flush=True)
            self._journal.append(Skipped(*key, str(error)))

    def _run_client(self, model: str, served_name: str, case: Case) -> bytes:
        command = [
            *(sys.executable, "-m", "shoal.load.compare.client"),
            *("--port", str(self._port), "--model", served_name),
            *("--checkpoint", str(checkpoint(self._folder, model))),
            *("--streams", str(case.streams), "--requests", str(case.requests)),
            *("--prompt-tokens", str(case.num_prompt), "--output-tokens", str(case.num_outputs)),
            # The same prompts for all servers; others in each case, as servers know earlier ones.
            *("--seed", str(case.streams)),
        ]
        if case.streams == REPEAT:
            command.append("--repeat")
        return output_of(command)


def measure_limits() -> Limits:
    """In a process of its own, whose memory is free again afterwards."""
    command = [sys.executable, "-m", "shoal.load.compare.limits"]
    return msgspec.json.decode(output_of(command), type=Limits)


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> bytes:
    """What it prints. Raises CaseError with its error."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        raise CaseError(f"no result within {CLIENT_TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise CaseError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


def _show(result: ClosedLoop | Repeats) -> None:
    if isinstance(result, Repeats):
        print(f"  sent twice: {result.first_ttft} then {result.repeat_ttft} ms", flush=True)
        return
    print(
        f"  {result.streams} streams: {result.tokens_per_s:.1f} tokens/s, "
        f"TTFT {result.ttft_p50:.0f} ms, TPOT {result.tpot_p50:.1f} ms "
        f"(p95 {result.tpot_p95:.1f}), client {result.client_cpu_s:.2f} s CPU",
        flush=True,
    )
