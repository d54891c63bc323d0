"""Versions of a model that come and go while requests run; this file has a server of its own."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import psutil
import pytest
from openai_calls import ask
from served import MODEL, Served, serve

from shoal.client.triton_stream import TritonStream

STREAM = {"model": MODEL, "prompt": "Once", "ignore_eos": True, "temperature": 0, "stream": True}
WAIT_S = 60.0
# Beats that were asked for before an unload come for 5 s; 4 s later they are missed.
UNHEARD_S = 11.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("versions"), max_num_seqs=8, num_kv_blocks=600) as running:
        yield running


def control(served: Served, *calls: Callable[[TritonStream], Awaitable[None]]) -> None:
    """Make calls that only the holder of the server's key may."""
    shim = psutil.Process(served.find_process("shoal.client.openai").pid)
    key = shim.environ()["SHOAL_CONTROL_KEY"]

    async def make() -> None:
        async with TritonStream(served.grpc_url, key) as triton:
            for call in calls:
                await call(triton)

    asyncio.run(make())


def load(served: Served) -> None:
    control(served, lambda triton: triton.load_model(MODEL))


def unload(served: Served) -> None:
    control(served, lambda triton: triton.unload_model(MODEL))


def num_stubs(served: Served) -> int:
    found = 0
    for process in served.descendants():
        with contextlib.suppress(psutil.Error):  # it ends just now
            found += "triton_python_backend_stub" in " ".join(process.cmdline())
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def has_unloaded(served: Served) -> bool:
    return ask(served, "text", prompt="Hello", max_tokens=2).status in (404, 503)


def test_a_request_of_an_unloaded_model_goes_on_until_its_client_hangs_up(served: Served) -> None:
    body = STREAM | {"max_tokens": 8000}
    url = f"{served.openai_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=WAIT_S) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        unload(served)
        until(lambda: has_unloaded(served), "it still takes requests")
        deadline = time.monotonic() + UNHEARD_S
        while time.monotonic() < deadline:
            assert '"error"' not in next(lines)
    until(lambda: num_stubs(served) == 0, "the unload waits for a request that nobody reads")
    load(served)
    served.wait_ready()


def test_another_version_takes_over_and_requests_end_where_they_are(served: Served) -> None:
    alone = ask(served, "text", prompt="Once", ignore_eos=True, max_tokens=400).only.text
    url = f"{served.openai_url}/v1/completions"
    repository = served.step_log.parent / "models" / MODEL
    with httpx.stream("POST", url, json=STREAM | {"max_tokens": 400}, timeout=WAIT_S) as kept:
        lines = (line for line in kept.iter_lines() if line)
        texts = [next(lines)]
        with httpx.stream("POST", url, json=STREAM | {"max_tokens": 8000}, timeout=WAIT_S) as lost:
            next(lost.iter_lines())
            shutil.copytree(repository / "1", repository / "2")
            load(served)
            assert ask(served, "text", prompt="Once", max_tokens=20).status == 200
            assert num_stubs(served) == 2
        texts += lines
    assert texts[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in texts)
    chunks = [json.loads(line.removeprefix("data: ")) for line in texts[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == alone
    until(lambda: num_stubs(served) == 1, "the former version does not go")
    assert ask(served, "text", prompt="Once", max_tokens=4).status == 200


def test_an_unloaded_model_stays_so_when_tritonserver_dies(served: Served) -> None:
    noticed = "was unloaded; it stays so"
    before = served.log.read_text().count(noticed)
    unload(served)
    until(lambda: served.log.read_text().count(noticed) > before, "not noticed")
    dead = served.find_process("bin/tritonserver")
    dead.kill()
    until(lambda: is_live(served) and not dead.is_running(), "no new tritonserver")
    deadline = time.monotonic() + UNHEARD_S
    while time.monotonic() < deadline:
        assert num_stubs(served) == 0, "it was loaded again"
        time.sleep(0.5)
    load(served)
    served.wait_ready()
    assert ask(served, "text", prompt="Once", max_tokens=4).status == 200


def is_live(served: Served) -> bool:
    """Whether tritonserver answers."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{served.triton_url}/v2/health/live", timeout=5).status_code == 200
    return False
