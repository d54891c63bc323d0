"""Environments of other people's clients: one each, pinned, apart from the project's own."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ENVIRONMENTS = Path(
    os.environ.get("SHOAL_ECOSYSTEM_DIR", FOLDER.parents[1] / "build" / "ecosystem")
)


def python_environment(name: str) -> Path:
    """The ``bin`` of an environment with all of ``requirements/<name>.txt``; made where missing."""
    requirements = FOLDER / "requirements" / f"{name}.txt"
    target = ENVIRONMENTS / name
    if not _is_current(target, requirements):
        print(f"Installing {requirements.name} into {target} ...", flush=True)
        shutil.rmtree(target, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(target))
        # All that is needed is in the file, so nothing is left to resolve.
        run(str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps",
            "--disable-pip-version-check", "-r", str(requirements))  # fmt: skip
        _mark_current(target, requirements)
    return target / "bin"


def node_environment() -> Path | None:
    """A folder with the checks for Node and what they import; None without node and npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None
    source, target = FOLDER / "clients" / "node", ENVIRONMENTS / "node"
    if not _is_current(target, source / "package-lock.json"):
        print(f"Installing OpenAI's client for Node into {target} ...", flush=True)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, target)
        run("npm", "ci", "--silent", "--ignore-scripts", cwd=target)
        _mark_current(target, source / "package-lock.json")
    for path in source.glob("*.mjs"):
        shutil.copy(path, target)
    return target


def run(*command: str, cwd: Path | None = None) -> None:
    """Raises SystemExit when it fails."""
    code = subprocess.run(command, cwd=cwd).returncode
    if code:
        raise SystemExit(f"failed with exit code {code}: {' '.join(command)[:300]}")


def _is_current(target: Path, pins: Path) -> bool:
    stamp = target / ".pins"
    return stamp.is_file() and stamp.read_text() == _digest(pins)


def _mark_current(target: Path, pins: Path) -> None:
    (target / ".pins").write_text(_digest(pins))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
