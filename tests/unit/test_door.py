"""The shim's door: refused there is what the backend's queue has no place for."""

import asyncio
import json
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from shoal.client.errors import ShoalError
from shoal.client.openai import middleware
from shoal.client.openai.door import BELIEVED_S, Door
from shoal.client.openai.middleware import DoorMiddleware, RequestMiddleware, RequestTracker
from shoal.scheduler.drain import DrainEstimate

FULL = DrainEstimate(
    is_saturated=True, is_full=True, max_queued_requests=16, num_queued=16, interval_s=0.1
)


def told(estimate: DrainEstimate, highest_weight: float = 1.0) -> dict[str, Any]:
    """As it arrives, by way of JSON."""
    values: dict[str, Any] = json.loads(json.dumps(estimate.at_the_door(highest_weight)))
    return values


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(clock: Clock) -> Door:
    return Door(clock=clock)


def num_let_in(door: Door, num_comers: int) -> int:
    count = 0
    while not door.is_shut and count < num_comers:
        door.enter()
        count += 1
    for _ in range(num_comers - count):
        with pytest.raises(ShoalError) as refused:
            door.enter()
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
    return count


def test_it_lets_in_as_many_as_there_are_places(door: Door, clock: Clock) -> None:
    door.take(told(replace(FULL, is_full=False, num_queued=13)))
    assert num_let_in(door, 50) == 3
    assert door.refused.total() == 47
    clock.now += 0.25  # two and a half more were handed over to a worker
    assert num_let_in(door, 50) == 2
    clock.now += 0.06
    assert num_let_in(door, 50) == 1


def test_each_is_told_the_place_after_those_promised_before(door: Door, clock: Clock) -> None:
    door.take(told(replace(FULL, num_refused=2)))
    assert [door.refusal().retry_after_ms for _ in range(3)] == [300, 400, 500]
    clock.now += 0.2
    door.take(told(replace(FULL, num_refused=2)))  # the backend refused none of these
    assert door.refusal().retry_after_ms == 400


def test_a_full_queue_of_tokens_has_no_place(door: Door) -> None:
    door.take(told(replace(FULL, num_queued=3)))
    assert num_let_in(door, 5) == 0


@pytest.mark.parametrize(
    "estimate",
    [
        replace(FULL, is_saturated=False),
        replace(FULL, policy="vtc"),  # a lighter tenant displaces a heavier one
        replace(FULL, policy="wfq"),
        replace(FULL, lowest_weight=0.5),  # a higher tier displaces a lower one
        replace(FULL, is_draining=True),  # the backend has better words for it
    ],
)
def test_it_is_open_where_somebody_might_get_in(door: Door, estimate: DrainEstimate) -> None:
    door.take(told(FULL))
    door.take(told(estimate))
    assert num_let_in(door, 50) == 50


def test_before_anything_was_told_it_is_open(door: Door) -> None:
    door.take(None)
    assert num_let_in(door, 50) == 50


def test_nobody_is_refused_on_old_news(door: Door, clock: Clock) -> None:
    door.take(told(FULL))
    assert door.is_shut
    clock.now += BELIEVED_S + 0.1
    assert num_let_in(door, 50) == 50


def ask(doors: list[Door], method: str = "POST", path: str = "/v1/completions") -> int:
    """The status of a request; nobody reads its body at the door."""
    statuses = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            assert message["status"] != 429 or b"retry-after-ms" in dict(message["headers"])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"x-shoal-slo-class", b"batch")],
    }
    scope["state"] = {"account": None}
    asyncio.run(DoorMiddleware(app, lambda: doors)(scope, receive, send))
    return int(statuses[0])


def test_a_request_is_refused_before_its_body_is_read(door: Door) -> None:
    assert ask([door]) == 200
    door.take(told(FULL))
    assert ask([door]) == 429
    assert door.refused == {"batch": 1}
    assert ask([door], "GET") == ask([door], path="/v1/models") == 200
    assert ask([door, Door()]) == 200  # it may be for the other model
    assert ask([]) == 200


def test_the_refusals_of_a_second_share_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, door: Door
) -> None:
    monkeypatch.setattr(middleware, "REFUSALS_LOGGED_S", 0.01)
    door.take(told(FULL))

    async def reach(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask_often(app: Any) -> None:
        for path in ("/v1/completions", "/v1/completions", "/v1/models"):
            scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            await app(scope | {"state": {"account": None}}, None, AsyncMock())
        await asyncio.sleep(0.05)

    with caplog.at_level("INFO", "shoal.openai.access"):
        inside = DoorMiddleware(reach, lambda: [door])
        asyncio.run(ask_often(RequestMiddleware(inside, RequestTracker())))
    models, refused = (record.getMessage() for record in caplog.records)
    assert " POST /v1/models 200 " in models
    assert refused.startswith("2 requests in ")


def test_what_was_refused_is_counted_by_tier_within_bounds(door: Door) -> None:
    door.take(told(FULL))
    for name in ("high", "low", "high", *map(str, range(100))):
        with pytest.raises(ShoalError):
            door.enter(name)
    assert (door.refused["high"], door.refused["low"]) == (2, 1)
    assert door.refused.total() == 103
    assert len(door.refused) <= 17
