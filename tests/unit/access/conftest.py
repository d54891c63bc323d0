"""A shim with a key file, over a fake tritonserver, for each file of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_pieces import echo_script
from fake_triton import FakeModel, FakeTriton
from key_calls import bearer
from shim_thread import ShimThread, wait_until

from shoal.client.cli.keys import add_key


@pytest.fixture(scope="module")
def triton() -> Iterator[FakeTriton]:
    with FakeTriton(fake=FakeModel()) as server:
        yield server


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    add_key(path, "first", {})
    return path


@pytest.fixture(scope="module")
def shim(triton: FakeTriton, keys_file: Path) -> Iterator[ShimThread]:
    origins = ("https://chat.example",)
    with ShimThread(
        triton.url, keys_file=keys_file, keys_interval_s=0.05, cors_origins=origins
    ) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def http(shim: ShimThread, triton: FakeTriton) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shim.url, timeout=20) as client:
        yield client
    triton.model.script = echo_script
    triton.model.requests.clear()


@pytest.fixture
def make_key(keys_file: Path, http: httpx.Client) -> Callable[..., str]:
    """Adds a key to the running server's file and waits until the server takes it."""

    def make(name: str, **limits: Any) -> str:
        key = add_key(keys_file, name, limits)
        wait_until(lambda: http.get("/version", headers=bearer(key)).status_code == 200, name)
        return key

    return make
