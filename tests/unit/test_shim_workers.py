"""Several shim processes on one port: what they share, and what each has of a key's limits."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_triton import MODEL, FakeTriton
from shim_thread import ShimThread

from shoal.client.cli.run_dir import RunDir
from shoal.client.errors import ShoalError
from shoal.client.openai.api_keys import ApiKey
from shoal.client.openai.key_limits import KeyAccount
from shoal.client.openai.response_store import ResponseStore
from shoal.client.openai.server import listen
from shoal.client.openai.settings import ShimSettings
from shoal.client.openai.shared_responses import SharedResponseStore

MakeStore = Callable[..., Any]


@pytest.fixture(params=["memory", "file"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Both stores keep the same rules."""

    def make(max_count: int = 9, max_bytes: int = 999, max_age_s: float = 9.0, **more: Any) -> Any:
        limits = (max_count, max_bytes, max_age_s)
        if request.param == "memory":
            return ResponseStore(*limits, **more)
        return SharedResponseStore(tmp_path / "responses.sqlite", *limits, **more)

    return make


def test_a_stored_response_is_its_owners(make_store: MakeStore) -> None:
    store = make_store()
    store.put("r1", b"{}", [{"role": "user", "content": "é"}], "me")
    found = store.get("r1", "me")
    assert (found.body, found.messages) == (b"{}", ({"role": "user", "content": "é"},))
    for owner, name in (("you", "r1"), ("me", "r2")):
        with pytest.raises(ShoalError) as caught:
            store.get(name, owner, "previous_response_id")
        assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    store.delete("r1", "me")
    with pytest.raises(ShoalError):
        store.get("r1", "me")
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_is_bounded_by_count_bytes_and_age(make_store: MakeStore) -> None:
    now = [0.0]
    store = make_store(3, 100, 10.0, clock=lambda: now[0])
    for number in range(5):
        store.put(f"r{number}", b"x" * 10, [], "")
    assert len(store) == 3
    with pytest.raises(ShoalError):
        store.get("r1", "")
    store.put("large", b"x" * 200, [], "")
    with pytest.raises(ShoalError):
        store.get("large", "")
    store.put("half", b"x" * 90, [], "")
    assert (len(store), store.num_bytes) == (1, 92)
    now[0] = 10.5
    with pytest.raises(ShoalError):
        store.get("half", "")


def test_two_processes_see_each_others_responses(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    one, two = (SharedResponseStore(path, 9, 999, 9.0) for _ in range(2))
    one.put("r1", b"{}", [], "me")
    two.put("r2", b"{}", [], "me")
    assert two.get("r1", "me").body == one.get("r2", "me").body
    two.delete("r1", "me")
    with pytest.raises(ShoalError):
        one.get("r1", "me")
    assert path.stat().st_mode & 0o077 == 0


def test_each_process_gives_out_its_share_of_a_keys_limits() -> None:
    limits: dict[str, Any] = {"requests_per_minute": 10, "max_concurrent": 3}
    key = ApiKey(name="a", sha256="0" * 64, **limits)
    account = KeyAccount(key, 1 / 2, clock=lambda: 0.0)
    started = [account.enter() for _ in range(2)]
    with pytest.raises(ShoalError, match="3 requests at once"):
        account.enter()
    for at in started:
        account.leave(at)
    for _ in range(3):
        account.leave(account.enter())
    with pytest.raises(ShoalError, match="10 requests a minute"):
        account.enter()


def test_workers_share_a_port_and_one_alone_does_not() -> None:
    settings = ShimSettings(port=0, num_workers=2)
    with listen(settings) as first:
        port = first.getsockname()[1]
        with listen(ShimSettings(port=port, num_workers=2)) as second:
            assert second.getsockname()[1] == port
        with pytest.raises(OSError, match="cannot listen"):
            listen(ShimSettings(port=port))


@pytest.fixture
def shims(tmp_path: Path) -> Iterator[tuple[FakeTriton, list[ShimThread]]]:
    with FakeTriton() as fake:
        first = ShimThread(fake.url, num_workers=2, shared_dir=tmp_path)
        second = ShimThread(fake.url, num_workers=2, shared_dir=tmp_path)
        with first, second:
            first.wait_ready()
            second.wait_ready()
            yield fake, [first, second]


def test_a_response_goes_on_in_another_process(
    shims: tuple[FakeTriton, list[ShimThread]],
) -> None:
    fake, (first, second) = shims
    body = {"model": MODEL, "input": "Hi"}
    answer = httpx.post(f"{first.url}/v1/responses", json=body).json()
    more = body | {"input": "And?", "previous_response_id": answer["id"]}
    reply = httpx.post(f"{second.url}/v1/responses", json=more)
    assert reply.status_code == 200
    assert '"And?"' in fake.model.requests[-1].inputs["messages"]
    assert '"Hi"' in fake.model.requests[-1].inputs["messages"]
    found = httpx.get(f"{second.url}/v1/responses/{answer['id']}")
    assert found.json()["id"] == answer["id"]


def test_each_process_has_a_channel_of_its_own(
    shims: tuple[FakeTriton, list[ShimThread]],
) -> None:
    fake, both = shims
    for shim in both:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        text = httpx.post(f"{shim.url}/v1/completions", json=body).json()["choices"][0]["text"]
        assert text == "w0 w1 "
    assert len(fake.model.channels) == 2


def test_what_is_shared_begins_empty_with_each_server() -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        run_dir = RunDir(Path(folder) / "run")
        run_dir.claim()
        check_shared(run_dir)
        run_dir.release()


def check_shared(run_dir: RunDir) -> None:
    (run_dir.fresh_shared() / "left").write_text("from the last one")
    shared = run_dir.fresh_shared()
    assert list(shared.iterdir()) == []
    assert shared.stat().st_mode & 0o077 == 0
