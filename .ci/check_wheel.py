"""Build the wheel, install it (not the editable tree) in a fresh environment, and serve from it.

The editable install sees every file of the checkout, so a package or data file that the wheel lacks
shows only here.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
QUESTION = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-wheel-") as folder:
        wheel = build_wheel(Path(folder))
        python = install(wheel, Path(folder) / "venv")
        import_all(python, Path(folder))
        serve_and_ask(python.parent / "shoal", Path(folder))
    print("wheel check passed")


def build_wheel(folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(ROOT))
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    run(str(python), "-m", "pip", "install", "--quiet", "-c", constraints, str(wheel))
    return python


def import_all(python: Path, folder: Path) -> None:
    """Import every module of the wheel but those that only tritonserver's stub, OpenVINO's
    environment or schemathesis can load."""
    code = (
        "import importlib, pathlib, shoal\n"
        "roots = [pathlib.Path(p) for p in shoal.__path__]\n"
        "names = {'shoal.' + '.'.join(f.relative_to(r).with_suffix('').parts)\n"
        "         for r in roots for f in r.rglob('*.py') if f.stem != '__main__'}\n"
        "names -= {'shoal.backend.model', 'shoal.backend.codec'}\n"
        "names -= {'shoal.load.compare.openvino_server', 'shoal.load.api_fuzz_hooks'}\n"
        "assert len(names) > 30, names\n"
        "assert all('site-packages' in str(r) for r in roots), roots\n"
        "[importlib.import_module(name) for name in sorted(names)]\n"
        "print('imported', len(names), 'modules of the wheel')\n"
    )
    run(str(python), "-c", code, cwd=folder)


def serve_and_ask(shoal: Path, folder: Path) -> None:
    ports = free_ports(4)
    names = ("openai", "http", "grpc", "metrics")
    flags = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    server = subprocess.Popen([str(shoal), "serve", *flags], cwd=folder)
    try:
        wait_until_ready(server, ports[0])
        answer = post(f"http://127.0.0.1:{ports[0]}/v1/chat/completions", QUESTION)
        text = answer["choices"][0]["message"]["content"]
        print("the wheel's server says:", text)
        if "Paris" not in text:
            raise SystemExit("the wheel's server gave no sensible answer")
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(STOP_TIMEOUT_S)
    if code != 0:
        raise SystemExit(f"the wheel's server left with exit code {code} after SIGTERM")


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the wheel's server ended at start with code {server.returncode}")
        try:
            url = f"http://127.0.0.1:{port}/health/ready"
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"the wheel's server was not ready within {START_TIMEOUT_S} s")


def post(url: str, body: dict[str, object]) -> dict:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def run(*command: str, cwd: Path | None = None) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    result = subprocess.run(command, cwd=cwd, env=environment)
    if result.returncode != 0:
        raise SystemExit(f"failed with exit code {result.returncode}: {' '.join(command)[:300]}")


if __name__ == "__main__":
    main()
