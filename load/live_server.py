"""A server of one's own for a measurement on the real stack: started, waited for, stopped."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

MODEL = "smollm2-135m-instruct"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


@contextmanager
def live_server(port: int, *flags: str, **settings: Any) -> Iterator[int]:
    """Serve the default model with these engine settings on ``port`` and the three after it;
    ``flags`` are further ones of ``shoal serve``.

    Yields the port of the OpenAI endpoint. Raises RuntimeError when the server does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-load-") as name:
        folder = Path(name)
        version = folder / "models" / MODEL / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text('backend: "shoal"\n')
        (version / "model.yaml").write_text(yaml.safe_dump({"weights": MODEL, **settings}))
        ports = [
            f"--{what}-port={port + i}"
            for i, what in enumerate(("openai", "http", "grpc", "metrics"))
        ]
        command = [str(Path(sys.executable).parent / "shoal"), "serve"]
        command += [f"--model-repository={folder / 'models'}", *ports, *flags]
        with (folder / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        try:
            _wait_ready(process, port, folder / "serve.log")
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def backend_status(port: int) -> dict[str, Any]:
    """What the backend says of itself; ``port`` is that of the OpenAI endpoint."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port + 1}/v2/models/{MODEL}/generate",
        json.dumps({"control": json.dumps({"op": "status"})}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        status: dict[str, Any] = json.loads(json.load(reply)["control_output"])
    return status


def wait_idle(port: int, timeout_s: float = 60.0) -> None:
    """Wait until nothing is live, so that one measurement does not disturb the next."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and backend_status(port)["num_live"]:
        time.sleep(0.2)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.3)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"the server did not become ready:\n{tail}")
