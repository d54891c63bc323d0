"""Names and paths of weights."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import CATALOGUE, DEFAULT_MODEL, cache_dir, resolve_weights

ENTRY = CATALOGUE[DEFAULT_MODEL]


@pytest.fixture
def _no_cache_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_cache_settings")
def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "shoal"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "shoal"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "shoal"
    monkeypatch.setenv("SHOAL_CACHE_DIR", "~/own")
    assert cache_dir() == tmp_path / "own"


def test_named_model_resolves_to_its_file(tmp_path: Path) -> None:
    path = ENTRY.path(tmp_path)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(ENTRY.file_bytes)  # sparse
    assert resolve_weights(DEFAULT_MODEL, tmp_path) == path
    assert path == tmp_path / "models" / DEFAULT_MODEL / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_missing_model_says_how_to_pull_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"shoal pull {DEFAULT_MODEL}"):
        resolve_weights(DEFAULT_MODEL, tmp_path)


def test_cut_short_model_says_so(tmp_path: Path) -> None:
    path = ENTRY.path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=f"4 bytes instead of {ENTRY.file_bytes}"):
        resolve_weights(DEFAULT_MODEL, tmp_path)


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    assert resolve_weights(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="no file or folder"):
        resolve_weights(str(tmp_path / "absent.gguf"))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"Known: .*{DEFAULT_MODEL}"):
        resolve_weights("smollm3")


def test_catalogue_needs_no_torch() -> None:
    code = "import sys, shoal.backend.weights.catalogue; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
