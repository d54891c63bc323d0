"""One shim over a fake tritonserver for all tests of this folder."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from fake_pieces import echo_script
from fake_triton import FakeModel, FakeTriton
from shim_thread import ShimThread


@pytest.fixture(scope="session")
def triton() -> Iterator[FakeTriton]:
    with FakeTriton(fake=FakeModel(), onnx=FakeModel(is_shoal=False)) as server:
        yield server


@pytest.fixture(scope="session")
def running(triton: FakeTriton) -> Iterator[ShimThread]:
    with ShimThread(triton.url) as shim:
        shim.wait_ready()
        yield shim


@pytest.fixture
def model(triton: FakeTriton) -> Iterator[FakeModel]:
    yield triton.model
    triton.model.script = echo_script
    triton.model.num_cached_tokens = 0
    triton.model.requests.clear()


@pytest.fixture
def http(running: ShimThread, model: FakeModel) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=20) as client:
        yield client


@pytest.fixture
def client(running: ShimThread, model: FakeModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made
