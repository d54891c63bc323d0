"""Runs a path's client beside a server of our own, and tells the CPU time of every process."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from shoal.load.path_client import PathLoad, PathResult

# Part of a command line -> what the process is. The first that matches counts.
ROLES = {
    "triton_python_backend_stub": "stub",
    "shoal.backend.worker": "worker",
    "shoal.client.openai": "shim",
    "tritonserver": "tritonserver",
    "shoal serve": "supervisor",
    "bin/shoal": "supervisor",
}
ROLE_NAMES = ("worker", "stub", "tritonserver", "shim", "supervisor", "client")


@dataclass(frozen=True, slots=True)
class PathRun:
    """One run of a client and what each process used meanwhile, in CPU seconds by role."""

    result: PathResult
    cpu_s: dict[str, float]


def server_processes() -> dict[int, str]:
    """Roles by process id, of everything below this process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "process_guard" in line:
            continue
        role = next((name for part, name in ROLES.items() if part in line), None)
        if role is not None:
            found[process.pid] = role
    return found


def cpu_by_role(processes: dict[int, str]) -> dict[str, float]:
    """CPU seconds so far, of all threads, those that have ended included."""
    tick = os.sysconf("SC_CLK_TCK")
    used: dict[str, float] = {}
    for pid, role in processes.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used[role] = used.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return used


def run_client(kind: str, port: int, load: PathLoad, seed: int = 0) -> PathRun:
    """Raises RuntimeError when requests fail."""
    flags = [f"--{'' if load.stream else 'no-'}stream", f"--{'' if load.ids else 'no-'}ids"]
    for name in ("streams", "requests", "max_tokens", "prompt_tokens"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(load, name))]
    processes = server_processes()
    before = cpu_by_role(processes)
    result = run_module("shoal.load.path_client", kind, str(port), "--seed", str(seed), *flags)
    after = cpu_by_role(processes)
    used = {role: after[role] - before[role] for role in after}
    if result.num_failed:
        raise RuntimeError(f"{result.num_failed} requests failed over {kind}")
    return PathRun(result, used | {"client": result.cpu_s})


def run_module(module: str, *arguments: str) -> PathResult:
    """The one line of JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
    )
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=PathResult)
