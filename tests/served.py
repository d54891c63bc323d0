"""A real Shoal, started by its own command line, for the end-to-end tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


@dataclass
class Served:
    """Where the server listens and what it leaves behind."""

    process: subprocess.Popen[bytes]
    openai_port: int
    http_port: int
    grpc_port: int
    metrics_port: int
    step_log: Path
    log: Path

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.openai_port}"

    @property
    def triton_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def steps(self) -> list[dict[str, Any]]:
        """The engine's step log so far; a half-written last line is left out."""
        lines = self.step_log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def status(self) -> dict[str, Any]:
        """The backend's own status, asked through Triton."""
        reply = httpx.post(
            f"{self.triton_url}/v2/models/{MODEL}/generate",
            json={"control": json.dumps({"op": "status"})},
            timeout=10,
        )
        reply.raise_for_status()
        return json.loads(reply.json()["control_output"])

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """The status once nothing is live; fails with the last one seen."""
        deadline = time.monotonic() + timeout_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            status = self.status()
            busy = status["num_live"] + status["num_running"] + status["num_waiting"]
            if busy == 0 and status["state"] == "ready":
                return status
            time.sleep(0.1)
        raise AssertionError(f"the server did not come to rest in {timeout_s} s: {status}")

    def ready_models(self) -> list[str]:
        """Ids of the models whose engine beats."""
        reply = httpx.get(f"{self.openai_url}/health/ready", timeout=5)
        return list(reply.json()["ready"])

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.openai_url}/health/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                code = self.process.poll()
                raise AssertionError(f"not ready (exit code {code}):\n{self.tail()}")
            time.sleep(0.2)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find_process(self, *needles: str) -> psutil.Process:
        """The one descendant whose command line holds all needles, guards left out."""
        found = []
        for process in self.descendants():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(needle in line for needle in needles) and "process_guard" not in line:
                found.append(process)
        assert len(found) == 1, f"{needles}: {found}"
        return found[0]

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def shoal_command() -> str:
    return str(Path(sys.executable).parent / "shoal")


def write_repository(folder: Path, **settings: Any) -> Path:
    """A model repository of one model with these engine settings."""
    version = folder / MODEL / "1"
    version.mkdir(parents=True)
    (folder / MODEL / "config.pbtxt").write_text('backend: "shoal"\n')
    (version / "model.yaml").write_text(yaml.safe_dump({"weights": MODEL, **settings}))
    return folder


def serve_flags(ports: list[int]) -> list[str]:
    names = ("openai", "http", "grpc", "metrics")
    return [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]


@contextmanager
def serve(folder: Path, *flags: str, **settings: Any) -> Iterator[Served]:
    """Start ``shoal serve``, wait until ready, and end it; fails if it leaves anything behind."""
    folder.mkdir(parents=True, exist_ok=True)
    step_log = folder / "steps.jsonl"
    repository = write_repository(folder / "models", step_log=str(step_log), **settings)
    ports = free_ports(4)
    log = folder / "serve.log"
    command = [shoal_command(), "serve", f"--model-repository={repository}", *serve_flags(ports)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, *flags],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    served = Served(process, *ports, step_log=step_log, log=log)
    try:
        served.wait_ready()
        yield served
    finally:
        stop(served)


def stop(served: Served) -> None:
    """SIGTERM; then nothing of the server may be left."""
    if served.process.poll() is not None:
        return
    family = served.descendants()
    served.process.send_signal(signal.SIGTERM)
    try:
        code = served.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        served.process.kill()
        raise AssertionError(f"shoal serve ignored SIGTERM:\n{served.tail()}") from None
    _, alive = psutil.wait_procs(family, timeout=5)
    alive = [item for item in alive if item.status() != psutil.STATUS_ZOMBIE]
    for orphan in alive:
        orphan.kill()
    assert not alive, f"left running: {alive}"
    assert code == 0, f"exit code {code}:\n{served.tail()}"
