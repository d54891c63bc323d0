"""Models by their names on a hub: fetched whole, or refused with advice."""

import io
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import resolve_weights
from shoal.client.cli.hub import fetch_from_hub
from shoal.client.cli.progress import Reporter

NAME = "someone/tiny"


class Hub(BaseHTTPRequestHandler):
    def __init__(self, folder: Path, listed: dict[str, int], *args: Any) -> None:
        self.folder, self.listed = folder, listed
        super().__init__(*args)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        content = None
        if path == f"/api/models/{NAME}":
            files = [{"rfilename": name, "size": size} for name, size in self.listed.items()]
            content = json.dumps({"siblings": files}).encode()
        elif path.startswith(f"/{NAME}/resolve/main/"):
            content = (self.folder / path.rsplit("/", 1)[-1]).read_bytes()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def listed() -> dict[str, int]:
    return {"pytorch_model.bin": 5, "code.py": 3, "../evil.json": 2, "onnx/config.json": 2}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, listed: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = write_tiny_checkpoint(tmp_path / "hub")
    listed |= {path.name: path.stat().st_size for path in folder.iterdir()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, listed))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield folder
    server.shutdown()
    server.server_close()


def fetch(root: Path, name: str = NAME) -> Path:
    return fetch_from_hub(name, root, Reporter(io.StringIO()))


def test_weights_and_config_come_and_nothing_else(tmp_path: Path, hub: Path) -> None:
    folder = fetch(tmp_path / "cache")
    names = {"config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).read_bytes() == (hub / name).read_bytes() for name in names)
    assert resolve_weights(NAME, tmp_path / "cache") == folder
    (hub / "config.json").unlink()
    assert fetch(tmp_path / "cache") == folder  # what is there is kept


def test_a_file_of_another_size_leaves_nothing(tmp_path: Path, listed: dict[str, int]) -> None:
    listed["model.safetensors"] += 1
    with pytest.raises(ConfigError, match=r"model\.safetensors came with"):
        fetch(tmp_path / "cache")
    assert not any((tmp_path / "cache" / "models").iterdir())
    with pytest.raises(ConfigError, match="run: shoal pull someone/tiny"):
        resolve_weights(NAME, tmp_path / "cache")


def test_what_a_hub_lacks_and_other_forms_are_refused(
    tmp_path: Path, listed: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="cannot be fetched.*404"):
        fetch(tmp_path / "cache", "someone/else")
    del listed["model.safetensors"]
    with pytest.raises(ConfigError, match="no other form is fetched"):
        fetch(tmp_path / "cache")
    with pytest.raises(ConfigError, match="must be owner/name"):
        fetch(tmp_path / "cache", "../../etc")


def test_without_network_the_advice_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="name its path as weights in") as caught:
        fetch(tmp_path / "cache")
    assert "\n" not in str(caught.value)
