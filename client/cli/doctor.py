"""``shoal doctor``: checks what serving needs; each problem comes with its fix."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import CATALOGUE
from shoal.client.cli import fetch, runtime
from shoal.client.cli.models_cmd import served_models
from shoal.client.cli.ports import port_faults
from shoal.client.cli.progress import mebibytes
from shoal.client.cli.serve import engine_configs
from shoal.client.cli.settings import ServeSettings

Status = Literal["ok", "warning", "problem"]
# A region of the Python backend starts at 1 MiB and grows with what is in flight.
SHM_NEEDED_BYTES = 16 * 2**20
SHM_ADVISED_BYTES = 64 * 2**20
TORCH_TIMEOUT_S = 120
_TORCH_PROBE = """
import json, torch
device, name = "cpu", "none, the CPU is used"
if torch.cuda.is_available():
    device, name = "cuda", torch.cuda.get_device_name(0)
elif torch.backends.mps.is_available():
    device, name = "mps", "Apple GPU"
print(json.dumps({"version": torch.__version__, "device": device, "name": name}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``fix`` is empty when nothing is to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def examine(settings: ServeSettings) -> list[Finding]:
    """Run every check; none raises."""
    checks: tuple[Callable[[ServeSettings], Iterator[Finding]], ...] = (
        check_python,
        check_tritonserver,
        check_ports,
        check_shared_memory,
        check_torch,
        check_cache,
        check_models,
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(settings)
        except ConfigError as error:
            findings.append(_problem(check.__name__.removeprefix("check_"), error))
    return findings


def check_python(_: ServeSettings) -> Iterator[Finding]:
    """Version, and the shared library that the stub loads."""
    version = fetch.python_version()
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    if supported:
        yield Finding("python", "ok", f"{version} ({sys.executable})")
    else:
        yield Finding("python", "problem", f"{version} is not supported", "Use 3.11 or 3.12.")
    library = runtime.shared_libpython()
    if library is not None:
        yield Finding("libpython", "ok", str(library))
    else:
        yield Finding(
            "libpython",
            "problem",
            f"no libpython{version}.so.1.0",
            f"Debian and Ubuntu: apt-get install libpython{version}; with pyenv: "
            f"PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {version}",
        )


def check_tritonserver(settings: ServeSettings) -> Iterator[Finding]:
    """Whether there is one, it fits this Python, and it starts."""
    found = runtime.locate_runtime(settings.cache_dir)
    if found is None:
        yield Finding(
            "tritonserver", "warning", "not fetched yet", "Run: shoal pull (or shoal serve)"
        )
        return
    runtime.check_python_fits(found)
    if runtime.needs_old_numpy(found.stub):
        yield _stub_numpy(settings)
    environment = runtime.server_environment(found, settings.cache_dir)
    try:
        done = subprocess.run(
            [str(found.server), "--help"], env=environment, capture_output=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("tritonserver", "problem", f"{found.server} does not run: {error}", _REFETCH)
        return
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    if "--model-repository" in text:
        yield Finding("tritonserver", "ok", f"{found.source}: {found.server}")
    else:
        yield Finding("tritonserver", "problem", text.strip()[-300:] or "it says nothing", _REFETCH)


_REFETCH = "Delete the runtime folder in the cache and run: shoal pull"


def _stub_numpy(settings: ServeSettings) -> Finding:
    if fetch.python_version() not in fetch.STUB_NUMPY:
        return Finding(
            "stub numpy",
            "problem",
            f"none for Python {fetch.python_version()}",
            "Use Python 3.11 or 3.12, or a newer tritonserver through SHOAL_TRITONSERVER.",
        )
    if not fetch.stub_numpy_dir(settings.cache_dir).is_dir():
        return Finding("stub numpy", "warning", "not fetched yet", "Run: shoal pull")
    return Finding("stub numpy", "ok", str(fetch.stub_numpy_dir(settings.cache_dir)))


def check_ports(settings: ServeSettings) -> Iterator[Finding]:
    """Whether serve could listen. Ports of a Shoal that runs already are fine."""
    faults = port_faults(settings.port_uses)
    if not faults:
        ports = ", ".join(str(use.port) for use in settings.port_uses)
        yield Finding("ports", "ok", f"{ports} are free")
    elif served_models(settings.openai_url, settings.tls_cert):
        yield Finding("ports", "ok", "in use by a Shoal that is running")
    else:
        for fault in faults:
            detail, _, fix = fault.partition(". ")
            yield Finding("ports", "problem", detail, fix)


def check_shared_memory(_: ServeSettings) -> Iterator[Finding]:
    """Requests and responses travel through /dev/shm."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding("/dev/shm", "problem", "missing or not writable", "Mount a tmpfs there.")
        return
    free = shutil.disk_usage(folder).free
    fix = "Give the container more, for example: docker run --shm-size=256m"
    if free < SHM_NEEDED_BYTES:
        yield Finding("/dev/shm", "problem", f"only {mebibytes(free)} free", fix)
    elif free < SHM_ADVISED_BYTES:
        yield Finding("/dev/shm", "warning", f"only {mebibytes(free)} free", fix)
    else:
        yield Finding("/dev/shm", "ok", f"{mebibytes(free)} free")


def check_torch(_: ServeSettings) -> Iterator[Finding]:
    """In a process of its own: it is slow to import, and a broken one may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            timeout=TORCH_TIMEOUT_S,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "torch", "problem", f"did not import in {TORCH_TIMEOUT_S} s", "Reinstall torch."
        )
        return
    try:
        probe = json.loads(done.stdout.decode().splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        yield Finding("torch", "problem", lines[-1] if lines else "no answer", "pip install torch")
        return
    yield Finding("torch", "ok", probe["version"])
    yield _accelerator(probe["device"], probe["name"])


def _accelerator(device: str, name: str) -> Finding:
    if device == "cpu" and runtime.has_gpu():
        return Finding(
            "accelerator",
            "warning",
            "an NVIDIA driver is loaded, but torch cannot use it",
            "Install a torch build with CUDA that fits the driver (see nvidia-smi).",
        )
    return Finding("accelerator", "ok", name)


def check_cache(settings: ServeSettings) -> Iterator[Finding]:
    """The cache folder and pip, which fills it."""
    folder = settings.cache_dir
    fetch.make_folder(folder)
    if not os.access(folder, os.W_OK):
        yield Finding("cache", "problem", f"{folder} is not writable", "Set --cache-dir.")
    else:
        free = shutil.disk_usage(folder).free
        yield Finding("cache", "ok", f"{folder} ({mebibytes(free)} free)")
    yield Finding("pip", "ok", " ".join(fetch.pip_command()))


def check_models(settings: ServeSettings) -> Iterator[Finding]:
    """The settings and weights of the models that serve would load, hashes included."""
    for name, config in zip(settings.model, engine_configs(settings), strict=True):
        entry = CATALOGUE.get(config.weights)
        title = f"model {name}"
        if entry is None:
            here = Path(config.weights).expanduser().exists()
            if here:
                yield Finding(title, "ok", config.weights)
            else:
                yield Finding(title, "problem", f"{config.weights} is missing", "Set weights.")
        elif not (path := entry.path(settings.cache_dir)).is_file():
            yield Finding(title, "warning", "not fetched yet", f"Run: shoal pull {entry.name}")
        elif fault := fetch.model_fault(entry, settings.cache_dir):
            detail = f"{path} is damaged ({fault})"
            yield Finding(title, "problem", detail, f"Run: shoal pull {entry.name}")
        else:
            yield Finding(title, "ok", f"{path} ({mebibytes(entry.file_bytes)}, hash right)")


def _problem(name: str, error: ConfigError) -> Finding:
    detail, _, fix = str(error).partition(". ")
    return Finding(name, "problem", detail, fix)


def findings_as_json(findings: list[Finding]) -> str:
    """For scripts."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def findings_as_text(findings: list[Finding]) -> str:
    """A line a finding, the fix below it."""
    marks = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.status]}  {finding.name}: {finding.detail}")
        if finding.fix:
            lines.append(f"         -> {finding.fix}")
    return "\n".join(lines)


def has_problem(findings: list[Finding]) -> bool:
    """Whether anything would keep Shoal from serving."""
    return any(finding.status == "problem" for finding in findings)
