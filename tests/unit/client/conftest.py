"""A fake tritonserver and a connection to it, of each test's own."""

from collections.abc import AsyncIterator, Iterator

import pytest
from fake_triton import FakeTriton

from shoal.client.triton_stream import TritonStream


@pytest.fixture
def fake() -> Iterator[FakeTriton]:
    with FakeTriton() as server:
        yield server


@pytest.fixture
async def triton(fake: FakeTriton) -> AsyncIterator[TritonStream]:
    async with TritonStream(fake.url) as client:
        yield client
