"""Runs the TypeScript SDK's own tests, where node and its test tools are there."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "client" / "typescript"
TIMEOUT_S = 240


def missing() -> str:
    """Why its tests cannot run here; empty when they can."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "node and npm are not installed"
    if not (FOLDER / "node_modules" / ".bin" / "vitest").exists():
        return "run `npm ci` in client/typescript first"
    return ""


needs_node = pytest.mark.skipif(bool(missing()), reason=f"TypeScript SDK not tested: {missing()}")


def run(*command: str, **environment: str) -> str:
    """Run in the SDK's folder; returns what it printed. Fails the test when it fails."""
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env={**os.environ, "NO_COLOR": "1", "CI": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_vitest(file: str, **environment: str) -> None:
    """Run one test file; one that skips everything counts as failed."""
    output = run("node_modules/.bin/vitest", "run", file, **environment)
    assert " passed" in output, output
    assert " skipped" not in output, output
