"""The monitor notices what Triton's readiness hides."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_triton import MODEL, FakeTriton
from shim_thread import wait_until

from shoal.client import heartbeat_monitor
from shoal.client.heartbeat_monitor import HeartbeatMonitor
from shoal.client.triton_stream import TritonStream


@pytest.fixture
async def monitor(
    fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HeartbeatMonitor]:
    monkeypatch.setattr(heartbeat_monitor, "INTERVAL_MS", 50)
    monkeypatch.setattr(heartbeat_monitor, "SILENCE_S", 0.3)
    monkeypatch.setattr(heartbeat_monitor, "RETRY_S", 0.05)
    watcher = HeartbeatMonitor(fake.url, MODEL, lost_after_s=0.5)
    watcher.start()
    yield watcher
    await watcher.stop()


async def settle(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.01)


async def test_beats_arrive_and_name_the_state(monitor: HeartbeatMonitor, fake: FakeTriton) -> None:
    assert await monitor.wait_ready(10)
    assert monitor.last is not None
    assert (monitor.last.max_model_len, monitor.last.free_blocks) == (128, 64)
    assert monitor.last.step_age_ms == 1.5
    fake.model.state = "restarting"
    await asyncio.wait_for(settle(lambda: monitor.last.state == "restarting"), 10)
    assert not monitor.is_ready


async def test_asks_again_when_an_ask_ends(monitor: HeartbeatMonitor, fake: FakeTriton) -> None:
    beats = []
    monitor.on_beat.append(lambda watcher: beats.append(watcher.last))
    await asyncio.wait_for(settle(lambda: fake.model.num_control >= 2 and len(beats) > 21), 20)
    assert not monitor.is_lost


async def test_lost_and_recovered_once_each(monitor: HeartbeatMonitor, fake: FakeTriton) -> None:
    events: list[str] = []
    monitor.on_lost.append(lambda _: events.append("lost"))
    monitor.on_recovered.append(lambda _: events.append("recovered"))
    assert await monitor.wait_ready(10)
    fake.model.stub_alive = False
    await asyncio.wait_for(settle(lambda: monitor.is_lost), 10)
    assert monitor.age_s >= 0.4
    async with TritonStream(fake.url) as triton:
        await triton.unload_model(MODEL)
        await triton.load_model(MODEL)
    await asyncio.wait_for(settle(lambda: not monitor.is_lost), 10)
    assert events == ["lost", "recovered"]
    assert monitor.is_ready


async def test_survives_a_restart_of_the_server(
    monitor: HeartbeatMonitor, fake: FakeTriton
) -> None:
    assert await monitor.wait_ready(10)
    await asyncio.to_thread(fake.stop)
    await asyncio.wait_for(settle(lambda: monitor.is_lost), 10)
    fake.start()
    assert await monitor.wait_ready(20)


async def test_never_lost_before_the_first_beat(fake: FakeTriton) -> None:
    fake.model.beating = False
    lost: list[HeartbeatMonitor] = []
    watcher = HeartbeatMonitor(fake.url, MODEL, lost_after_s=0.05)
    watcher.on_lost.append(lost.append)
    watcher.start()
    assert not await watcher.wait_ready(0.3)
    assert not lost
    assert watcher.age_s == float("inf")
    await watcher.stop()


async def test_a_failing_callback_harms_nothing(
    monitor: HeartbeatMonitor, fake: FakeTriton
) -> None:
    def explode(_: HeartbeatMonitor) -> None:
        raise RuntimeError("no")

    monitor.on_beat.append(explode)
    beats: list[HeartbeatMonitor] = []
    monitor.on_beat.append(beats.append)
    await asyncio.wait_for(settle(lambda: len(beats) > 3), 10)


async def test_stop_cancels_the_stream(fake: FakeTriton) -> None:
    watcher = HeartbeatMonitor(fake.url, MODEL)
    watcher.start()
    assert await watcher.wait_ready(10)
    await watcher.stop()
    asked = fake.model.num_control
    await asyncio.sleep(0.3)
    assert fake.model.num_control == asked
    await asyncio.to_thread(wait_until, lambda: watcher.age_s > 0.2, "still beating")


async def test_an_ask_takes_as_long_whatever_its_beats_interval(
    monitor: HeartbeatMonitor, fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    await monitor.stop()
    asked: list[dict[str, Any]] = []
    heartbeats = TritonStream.heartbeats

    def noted(self: TritonStream, *arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return heartbeats(self, *arguments, **options)

    monkeypatch.setattr(TritonStream, "heartbeats", noted)
    for interval_ms in (None, 100, 5000):
        watcher = HeartbeatMonitor(fake.url, MODEL, interval_ms=interval_ms)
        watcher.start()
        assert await watcher.wait_ready(10)
        await watcher.stop()
    told = [(options["interval_ms"], options["count"]) for options in asked]
    assert told == [(50, 20), (100, 10), (5000, 1)]
