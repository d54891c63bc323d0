"""The client of the measurements, against the shim over real HTTP."""

import asyncio
from typing import Any

import pytest
from fake_pieces import Piece, echo_script
from fake_triton import MODEL, FakeModel
from shim_thread import ShimThread

from shoal.load.live_client import LiveClient, LiveRecord, LiveRequest


def test_the_client_of_measurements_keeps_its_connection(
    running: ShimThread, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"message": "full", "status": 429, "code": "queue_full", "retry_after_ms": 2300}
    refusal = [Piece(error=full)]
    model.script = lambda r: iter(refusal) if r.sampling["max_tokens"] == 1 else echo_script(r)
    opened = []
    connect = asyncio.open_connection

    async def count(host: str, port: int) -> Any:
        opened.append(port)
        return await connect(host, port)

    monkeypatch.setattr(asyncio, "open_connection", count)
    client = LiveClient(int(running.url.rpartition(":")[2]), MODEL)

    async def ask_each(outputs: list[int]) -> list[LiveRecord]:
        records = []
        for num_outputs in outputs:
            record, task = client.begin(LiveRequest(0.0, 4, num_outputs))
            await task
            records.append(record)
        return records

    for _ in range(2):  # an event loop each
        records = asyncio.run(ask_each([3, 1, 2]))
        assert [record.status for record in records] == [200, 429, 200]
        assert [record.num_tokens for record in records] == [3, 0, 2]
        assert records[1].refused[0][2] == 2.3
    assert len(opened) == 2
