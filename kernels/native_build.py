"""Compiles the CPU kernels in ``native/`` for this machine, once, into a cache. Without torch."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
MAIN_SOURCE = "shoal_kernels.cpp"
# -ffp-contract=off: the compiler must not choose where a multiply-add is fused, or a row's bits
# would depend on which copy of a loop computed it.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fopenmp", "-w")
COMPILE_TIMEOUT_S = 300

Notify = Callable[[str], None]


class NativeBuildError(RuntimeError):
    """The kernels cannot be compiled here; one line that says why."""


def build_library(directory: Path, notify: Notify | None = None) -> Path:
    """The compiled library in ``directory``; compiles it, calling ``notify``, when it is missing.

    Its name holds a hash of the sources, the flags, the compiler and the CPU, so that none of them
    can change under it. Two builders at once do the work twice and both end with a whole file.
    """
    compiler = find_compiler()
    march = _machine_flag(compiler)
    target = directory / f"{_fingerprint(compiler, march)}.so"
    if target.is_file():
        return target
    if notify:
        notify(f"compiling the CPU kernels with {Path(compiler).name} (some seconds, once)")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds code to be run
        with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as folder:
            library = _compile(compiler, march, Path(folder))
            os.replace(library, target)
    except OSError as error:
        raise NativeBuildError(f"{directory} cannot be written: {error.strerror}") from error
    return target


def find_compiler() -> str:
    """$CXX, else the first of g++ and c++ that is here."""
    own = os.environ.get("CXX")
    for name in (own,) if own else ("g++", "c++"):
        if path := shutil.which(name):
            return path
    if own:
        raise NativeBuildError(f"the compiler that CXX names, {own!r}, is not here")
    raise NativeBuildError("no C++ compiler is here (on Debian: apt-get install g++)")


def _machine_flag(compiler: str) -> tuple[str, ...]:
    """Code for exactly this CPU, where the compiler knows it."""
    for flag in ("-march=native", "-mcpu=native"):
        try:
            _run([compiler, flag, "-E", "-x", "c++", os.devnull])
        except NativeBuildError:
            continue
        return (flag,)
    return ()


def _compile(compiler: str, march: tuple[str, ...], folder: Path) -> Path:
    compiled, library = folder / "kernels.o", folder / "kernels.so"
    _run([compiler, *FLAGS, *march, "-c", str(SOURCES / MAIN_SOURCE), "-o", str(compiled)])
    # Linked without -fopenmp: the OpenMP runtime is the one that torch has loaded, and no other.
    _run([compiler, "-shared", str(compiled), "-o", str(library)])
    return library


def _fingerprint(compiler: str, march: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (_run([compiler, "--version"]), *FLAGS, *march, *_cpu_description()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _cpu_description() -> Iterator[str]:
    """What -march=native depends on."""
    yield platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    wanted = ("flags", "Features", "model name", "cpu family", "model")
    seen = set()
    for line in lines:
        name = line.split(":")[0].strip()
        if name in wanted and name not in seen:  # of the first core
            seen.add(name)
            yield line


def _run(command: list[str]) -> str:
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{name} cannot be run: {error}") from error
    if done.returncode:
        raise NativeBuildError(f"{name} failed: {_first_error(done.stderr)}")
    return done.stdout


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return (errors or lines or ["it gave no reason"])[0][:300]
