"""One real server a session, in fp32 with every step logged."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_document import checked_httpx
from served import Served, serve


@pytest.fixture(autouse=True)
def answers_of_the_server_are_checked() -> Iterator[None]:
    with checked_httpx():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("served"), dtype="float32", max_num_seqs=64) as server:
        yield server


@pytest.fixture(autouse=True)
def close_event_loop_clients() -> Iterator[None]:
    """Each test gets a fresh loop; nothing of gRPC's may outlive it."""
    yield
    asyncio.set_event_loop_policy(None)
