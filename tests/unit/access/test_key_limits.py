"""How much a key may use."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_pieces import Piece, echo_script
from fake_triton import FakeTriton
from key_calls import CHAT, bearer, body
from shim_thread import wait_until
from starlette.datastructures import Headers

from shoal.client.errors import ShoalError
from shoal.client.openai.access import Access
from shoal.client.openai.api_keys import ApiKey, KeyRing, hash_key
from shoal.client.openai.key_limits import KeyAccount


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def account(**limits: Any) -> tuple[KeyAccount, Clock]:
    clock = Clock()
    return KeyAccount(ApiKey(name="a", sha256="0" * 64, **limits), clock=clock), clock


def refused(work: Callable[[], Any]) -> float:
    """The wait that a refusal names, in seconds."""
    with pytest.raises(ShoalError) as caught:
        work()
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.retry_after_ms is not None
    return caught.value.retry_after_ms / 1000


def test_requests_a_minute() -> None:
    limited, clock = account(requests_per_minute=30)
    for _ in range(30):
        limited.enter()
    assert refused(limited.enter) == pytest.approx(2, abs=0.01)
    clock.now += 1
    wait_s = refused(limited.enter)
    assert wait_s == pytest.approx(1, abs=0.01)
    clock.now += wait_s  # the wait that was told is enough
    limited.enter()
    refused(limited.enter)
    clock.now += 3600  # no more than a minute's worth is kept
    for _ in range(30):
        limited.enter()
    refused(limited.enter)


def test_requests_at_once() -> None:
    limited, clock = account(max_concurrent=2)
    started = [limited.enter(), limited.enter()]
    assert refused(limited.enter) == pytest.approx(0.5, abs=0.01)
    clock.now += 11
    limited.leave(started.pop())
    assert limited.num_open == 1
    limited.enter()
    assert refused(limited.enter) == pytest.approx(1.5, abs=0.01), "it learns how long they take"


def test_tokens_a_minute() -> None:
    limited, clock = account(tokens_per_minute=600)
    lease = limited.reserve_tokens(500)
    assert refused(lambda: limited.reserve_tokens(200)) == pytest.approx(10, abs=0.01)
    lease.settle(100)
    lease.settle(0)  # only once
    limited.reserve_tokens(500)
    assert refused(lambda: limited.reserve_tokens(0)) > 0
    clock.now += 60
    # More than the limit can ever hold is let through when all is there, and paid off after.
    limited.reserve_tokens(0).settle(1200)
    assert refused(lambda: limited.reserve_tokens(10)) == pytest.approx(61, abs=0.1)
    clock.now += 120
    limited.reserve_tokens(5000)


def test_limits_follow_the_file() -> None:
    access = Access()
    key = ApiKey(name="a", sha256=hash_key("secret"), requests_per_minute=2)
    access.replace(KeyRing((key,)))
    headers = Headers(bearer("secret"))
    first = access.account_of(headers)
    assert first is not None
    first.enter()
    first.enter()
    access.replace(KeyRing((key.model_copy(update={"requests_per_minute": 3}),)))
    again = access.account_of(headers)
    assert again is first
    again.enter()
    refused(again.enter)
    access.replace(KeyRing((key.model_copy(update={"requests_per_minute": None}),)))
    first.enter()


def test_limits_over_http(http: httpx.Client, make_key: Any) -> None:
    key = make_key("few", requests_per_minute=2)
    statuses = [http.post(CHAT, json=body(), headers=bearer(key)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    reply = http.post(CHAT, json=body(), headers=bearer(key))
    assert 1 <= int(reply.headers["retry-after"]) <= 30
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert http.get("/v1/models", headers=bearer(key)).status_code == 200, "reading is free"
    other = make_key("other")
    assert http.post(CHAT, json=body(), headers=bearer(other)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_over_http(
    http: httpx.Client, triton: FakeTriton, make_key: Any, stream: bool
) -> None:
    triton.model.script = lambda request: iter([Piece("x", finish_reason="stop")])
    headers = bearer(make_key(f"tokens-{stream}", tokens_per_minute=100))

    def ask(**fields: Any) -> int:
        return http.post(CHAT, json=body(stream=stream, **fields), headers=headers).status_code

    # Each sets aside 60 and more, uses two, and gives the others back.
    assert [ask(max_completion_tokens=60) for _ in range(5)] == [200] * 5
    assert ask(max_tokens=99) == 429
    triton.model.script = echo_script
    assert [ask(max_tokens=60) for _ in range(2)] == [200, 429]


def test_concurrency_over_http(http: httpx.Client, triton: FakeTriton, make_key: Any) -> None:
    triton.model.script = lambda request: iter([Piece("x"), Piece("never", delay_s=3600)])
    key = make_key("single", max_concurrent=1)
    with http.stream("POST", CHAT, json=body(stream=True), headers=bearer(key)):
        assert http.post(CHAT, json=body(), headers=bearer(key)).status_code == 429
    triton.model.script = echo_script
    wait_until(
        lambda: http.post(CHAT, json=body(), headers=bearer(key)).status_code == 200,
        "a client that left must free its place",
    )
