"""The tritonserver to run: where it lies, its private backend folder, environment, command line.

The embedded one comes from a wheel (see ``fetch``). In NVIDIA's images the one under
/opt/tritonserver is used, and ``SHOAL_TRITONSERVER`` names any other.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.backend.engine_config import ConfigError
from shoal.client.cli.fetch import (
    fetch_runtime,
    fetch_stub_numpy,
    python_version,
    runtime_dir,
    stub_numpy_dir,
)
from shoal.client.cli.progress import Reporter

SYSTEM_ROOT = Path("/opt/tritonserver")
OVERRIDE = "SHOAL_TRITONSERVER"
# Headers of gRPC calls that the backend sees as request parameters.
HEADER_PATTERN = "(x-request-id|x-shoal-.*|traceparent|tracestate)"


@dataclass(frozen=True, slots=True)
class TritonRuntime:
    """A tritonserver and the parts of its Python backend, for one Python version."""

    server: Path
    python_backend: Path  # holds libtriton_python.so and triton_python_backend_utils.py
    stub: Path  # the process that runs our backend, linked against one libpython
    library_dirs: tuple[Path, ...]
    source: str  # "embedded", "system" or the name of the setting it came from


@dataclass(frozen=True, slots=True)
class TritonPorts:
    """Where tritonserver listens."""

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


def prepare_runtime(cache_root: Path, reporter: Reporter | None = None) -> TritonRuntime:
    """The tritonserver to use, fetched first if need be, and checked against this Python."""
    if locate_runtime(cache_root) is None:
        fetch_runtime(cache_root, reporter)
    runtime = locate_runtime(cache_root)
    assert runtime is not None
    check_python_fits(runtime)
    if needs_old_numpy(runtime.stub):
        fetch_stub_numpy(cache_root, reporter)
    return runtime


def needs_old_numpy(stub: Path) -> bool:
    """Whether a stub was built with a binding library that knows only numpy 1's memory layout.

    Those that know both look for ``numpy._core``, the name that came with numpy 2.
    """
    return b"numpy._core" not in stub.read_bytes()


def locate_runtime(cache_root: Path) -> TritonRuntime | None:
    """The tritonserver to use; None when it first has to be fetched."""
    if named := os.environ.get(OVERRIDE):
        return _system_runtime(_root_of(Path(named).expanduser()), OVERRIDE)
    if (SYSTEM_ROOT / "bin" / "tritonserver").is_file():
        return _system_runtime(SYSTEM_ROOT, "system")
    unpacked = runtime_dir(cache_root)
    return embedded_runtime(unpacked) if unpacked.is_dir() else None


def embedded_runtime(unpacked: Path) -> TritonRuntime:
    """The runtime inside an unpacked wheel, with the stub of this Python's version."""
    root = unpacked / "pytriton" / "tritonserver"
    version = python_version()
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        have = sorted(path.parent.name for path in root.glob("python_backend_stubs/*/*"))
        raise ConfigError(
            f"The Triton runtime in {unpacked} has no stub for Python {version} "
            f"(it has: {', '.join(have) or 'none'}). Use one of those Pythons, "
            f"or delete that folder and run: shoal pull"
        )
    return _checked(
        TritonRuntime(
            server=root / "bin" / "tritonserver",
            python_backend=root / "backends" / "python",
            stub=stub,
            library_dirs=(unpacked / "nvidia_pytriton.libs",),
            source="embedded",
        )
    )


def _system_runtime(root: Path, source: str) -> TritonRuntime:
    backend = root / "backends" / "python"
    return _checked(
        TritonRuntime(
            server=root / "bin" / "tritonserver",
            python_backend=backend,
            stub=backend / "triton_python_backend_stub",
            library_dirs=tuple(path for path in (root / "lib",) if path.is_dir()),
            source=source,
        )
    )


def _root_of(path: Path) -> Path:
    """The installation folder, given it or the executable inside its ``bin``."""
    return path.parent.parent if path.is_file() else path


def _checked(runtime: TritonRuntime) -> TritonRuntime:
    for part in (runtime.server, runtime.stub, runtime.python_backend / "libtriton_python.so"):
        if not part.is_file():
            fix = (
                f"{OVERRIDE} must name tritonserver or its installation folder."
                if runtime.source != "embedded"
                else "Delete its folder and run: shoal pull"
            )
            raise ConfigError(f"The Triton runtime is not complete: {part} is missing. {fix}")
    return runtime


def stub_python_version(stub: Path) -> str | None:
    """The ``3.x`` whose libpython a stub is linked against, read off the file."""
    found = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return found.group(1).decode() if found else None


def shared_libpython() -> Path | None:
    """This Python's shared library, which the stub loads; None when it was built without one."""
    name = f"libpython{python_version()}.so.1.0"
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        os.path.join(sys.base_prefix, "lib"),
        sysconfig.get_config_var("LIBPL"),
        *_multiarch_folders(),
    ]
    for folder in folders:
        if folder and (path := Path(folder) / name).exists():
            return path
    return None


def _multiarch_folders() -> list[str]:
    triplet = sysconfig.get_config_var("MULTIARCH")
    return [f"/usr/lib/{triplet}", f"/lib/{triplet}"] if triplet else []


def check_python_fits(runtime: TritonRuntime) -> None:
    """Raise ConfigError, with the fix, unless the stub can run this Python."""
    version = python_version()
    wanted = stub_python_version(runtime.stub)
    if wanted is not None and wanted != version:
        raise ConfigError(
            f"The Triton runtime ({runtime.source}) runs Python {wanted}, but Shoal is installed "
            f"in Python {version}. Install Shoal with Python {wanted}."
        )
    if shared_libpython() is None:
        raise ConfigError(
            f"Python {version} has no shared library libpython{version}.so.1.0, which the Triton "
            f"server needs. On Debian and Ubuntu: apt-get install libpython{version}; with pyenv: "
            f"PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {version}"
        )


def build_backend_directory(
    runtime: TritonRuntime, target: Path, cache_root: Path, model_source: Path | None = None
) -> Path:
    """Lay out ``target`` for --backend-directory, replacing what is there; returns it.

    Copies, not links: tritonserver refuses a backend library outside this folder. Of ours only a
    few lines that import the installed backend: tritonserver appends that folder to the stub's
    module path, and anything else in it would become an importable top-level module.
    ``model_source`` is a backend to run in place of the installed one.
    """
    shutil.rmtree(target, ignore_errors=True)
    python, shoal = target / "python", target / "shoal"
    python.mkdir(parents=True)
    shoal.mkdir()
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(runtime.python_backend / name, python)
    shutil.copy(runtime.stub, python / "triton_python_backend_stub")
    numpy_dir = stub_numpy_dir(cache_root) if needs_old_numpy(runtime.stub) else None
    body = model_source.read_text("utf-8") if model_source else BACKEND_IMPORT
    (shoal / "model.py").write_text(_prelude(numpy_dir) + body, "utf-8")
    return target


BACKEND_IMPORT = "from shoal.backend.model import TritonPythonModel\n"


def _prelude(numpy_dir: Path | None) -> str:
    """What the stub runs first, since it ignores PYTHON* variables.

    It takes the current folder off the module path, and makes ``numpy`` the one in ``numpy_dir``.
    """
    lines = ["import sys", "sys.path[:] = [path for path in sys.path if path]"]
    if numpy_dir is not None:
        lines += [f"sys.path.insert(0, {str(numpy_dir)!r})", "import numpy", "del sys.path[0]"]
    return "\n".join([*lines, ""])


def packaged_model_repository() -> Path:
    """The model repository that comes with the package."""
    spec = importlib.util.find_spec("shoal.model_repository")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ConfigError("shoal.model_repository is not installed: reinstall shoal-llm.")
    return Path(folders[0])


# Whoever may load a model may run code, and shared memory reaches into the server: these calls need
# a key that the supervisor draws at each start and gives to the shim alone.
CLOSED_APIS = "model-repository,shared-memory,trace,logging"
CONTROL_HEADER = "shoal-control-key"
# tritonserver parses JSON by recursion: with the usual 8 MiB of stack a body of 130,000 brackets
# ends it. A thread's stack is only address space until it is used.
SERVER_STACK_BYTES = 4 << 30
NUM_SENDING_THREADS = 4  # of each model, for what its stub sends


def server_environment(runtime: TritonRuntime, cache_root: Path) -> dict[str, str]:
    """The environment of tritonserver, its stubs and our workers."""
    libpython = shared_libpython()
    libraries = [*runtime.library_dirs, *([libpython.parent] if libpython else [])]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    # The stub takes the python3 it finds first: with the venv's bin in front it gets the venv's
    # packages, editable installs included.
    own_bin = os.path.dirname(os.path.abspath(sys.executable))
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(
            [*map(str, libraries), *([inherited] if inherited else [])]
        ),
        "PATH": os.pathsep.join([own_bin, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # for the workers
        "SHOAL_GUARD_STACK_BYTES": str(SERVER_STACK_BYTES),
        "SHOAL_CACHE_DIR": str(cache_root),
    }


def server_command(
    runtime: TritonRuntime,
    *,
    model_repository: Path,
    backend_directory: Path,
    ports: TritonPorts,
    load_models: Sequence[str] = (),
    exit_timeout_s: int = 30,
    shm_prefix: str = "shoal_",
    control_key: str | None = None,
    log_verbose: int = 0,
) -> list[str]:
    """The command line of tritonserver. Models not in ``load_models`` are loaded by request."""
    command = [
        str(runtime.server),
        f"--model-repository={model_repository}",
        f"--backend-directory={backend_directory}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in load_models),
        f"--http-address={ports.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={ports.host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={ports.host}",
        f"--metrics-port={ports.metrics}",
        f"--grpc-header-forward-pattern={HEADER_PATTERN}",
        f"--exit-timeout-secs={exit_timeout_s}",
        f"--log-verbose={log_verbose}",
        # A name of our own lets what a killed server left in /dev/shm be found and removed.
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        # Each response goes through one of these threads, by turns: of 32 each is always cold.
        f"--backend-config=python,thread-pool-size={NUM_SENDING_THREADS}",
    ]
    if control_key is not None:
        command += [
            f"--http-restricted-api={CLOSED_APIS}:{CONTROL_HEADER}={control_key}",
            f"--grpc-restricted-protocol={CLOSED_APIS}:{CONTROL_HEADER}={control_key}",
        ]
    if not has_gpu():
        command += ["--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"]
    return command


def kill_stubs(server_pid: int, model_folder: Path) -> None:
    """Kill the stubs below ``server_pid`` that run a model, frozen or not; their workers follow."""
    import psutil

    try:
        below = psutil.Process(server_pid).children(recursive=True)
    except psutil.Error:
        return
    for process in below:
        with contextlib.suppress(psutil.Error):
            program, *arguments = process.cmdline() or [""]
            is_stub = program.endswith("triton_python_backend_stub")
            if is_stub and any(word.startswith(f"{model_folder}/") for word in arguments):
                process.kill()


def remove_shared_memory(shm_prefix: str) -> None:
    """Remove the regions of a tritonserver that was killed. The caller knows that none runs."""
    for region in Path("/dev/shm").glob(f"{shm_prefix}*"):
        with contextlib.suppress(OSError):
            region.unlink()


def has_gpu() -> bool:
    """Whether an NVIDIA driver is loaded (no torch needed to see that)."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
