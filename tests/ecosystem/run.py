"""Starts the real server and lets other people's clients at it.

    make ecosystem                             the clients that CI runs
    make ecosystem ARGS=--all                  and the measuring tools
    make ecosystem ARGS="lm-eval node"         some of them

Each has a pinned environment of its own (``environments``). README.md has what was seen.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import browser
import tools
from environments import FOLDER, node_environment, python_environment
from picture_model import NAME as PICTURE_MODEL
from picture_model import add_picture_model
from served import MODEL, Served, free_ports, serve, shoal_command


def pytest_suite(name: str) -> tools.Suite:
    """Checks of a Python client that are pytest's, in that client's environment."""

    def suite(_: Served, environment: dict[str, str]) -> int:
        python = python_environment("clients") / "python"
        checks = str(FOLDER / "clients" / f"check_{name}.py")
        settings = str(FOLDER / "pytest.ini")
        return tools.call([str(python), "-m", "pytest", "-q", "-c", settings, checks], environment)

    return suite


def node_suite(_: Served, environment: dict[str, str]) -> int:
    folder = node_environment()
    if folder is None:
        print("node and npm are not installed: OpenAI's client for Node is not checked")
        return 0
    return tools.call(["node", "--test", "openai.test.mjs"], environment, folder)


CLIENTS: dict[str, tools.Suite] = {
    "openai": pytest_suite("openai"),
    "langchain": pytest_suite("langchain"),
    "litellm": pytest_suite("litellm"),
    "node": node_suite,
}
SUITES = CLIENTS | {"browser": browser.suite} | tools.SUITES


@contextmanager
def server(folder: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    """A server with keys and two models, and the environment that tells the checks of it."""
    keys = folder / "keys.yaml"
    key = make_key(keys, "checks")
    limited_key = make_key(keys, "limited", "--requests-per-minute", "30")
    os.environ["SHOAL_API_KEY"] = key
    add_picture_model(folder / "served" / "models", folder / "picture")
    (pages_port,) = free_ports(1)
    origin = f"--cors-origin={browser.origin(pages_port)}"
    flags = [origin, f"--keys-file={keys}", f"--model={MODEL}", f"--model={PICTURE_MODEL}"]
    with serve(folder / "served", *flags) as served:
        wait_for_both(served)
        yield (
            served,
            {
                "SHOAL_CHECK_URL": served.openai_url,
                "SHOAL_CHECK_GRPC": served.grpc_url,
                "SHOAL_CHECK_HTTP": f"127.0.0.1:{served.http_port}",
                "SHOAL_CHECK_MODEL": MODEL,
                "SHOAL_CHECK_PICTURE_MODEL": PICTURE_MODEL,
                "SHOAL_CHECK_KEY": key,
                "SHOAL_CHECK_LIMITED_KEY": limited_key,
                "SHOAL_CHECK_PAGES_PORT": str(pages_port),
            },
        )


def make_key(path: Path, name: str, *limits: str) -> str:
    command = [shoal_command(), "keys", "add", name, "--keys-file", str(path), *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


def wait_for_both(served: Served, timeout_s: float = 60) -> None:
    """Readiness is that of any model."""
    deadline = time.monotonic() + timeout_s
    while not {MODEL, PICTURE_MODEL} <= set(served.ready_models()):
        if time.monotonic() > deadline:
            raise SystemExit(f"one was not ready in {timeout_s} s:\n{served.tail()}")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Let other people's clients at a real server.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--all", action="store_true", help="the measuring tools too")
    given = parser.parse_args()
    if unknown := set(given.suites) - set(SUITES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    names = given.suites or list(SUITES if given.all else CLIENTS)
    results = {}
    with (
        tempfile.TemporaryDirectory(prefix="shoal-ecosystem-") as folder,
        server(Path(folder)) as (served, environment),
    ):
        for name in names:
            print(f"\n== {name}", flush=True)
            started = time.monotonic()
            code = SUITES[name](served, environment)
            results[name] = (code, time.monotonic() - started)
            served.wait_idle()
    print()
    for name, (code, seconds) in results.items():
        print(f"{name:14} {'passed' if code == 0 else f'FAILED ({code})'} in {seconds:.0f} s")
    num_failed = sum(code != 0 for code, _ in results.values())
    print(f"{len(results) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
