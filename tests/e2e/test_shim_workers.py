"""Two shim processes on one port, over one real server."""

import concurrent.futures
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from served import MODEL, Served, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("workers")
    with serve(folder, "--shim-workers=2", max_num_seqs=32) as running:
        yield running


def shims(served: Served) -> list[psutil.Process]:
    found = []
    for process in served.descendants():
        line = " ".join(process.cmdline())
        if "shoal.client.openai" in line and "process_guard" not in line:
            found.append(process)
    return found


def pid_of(client: httpx.Client) -> int:
    """The process that the client's connection leads to."""
    return int(client.get("/health").json()["process"])


def client_to(served: Served, pid: int) -> httpx.Client:
    for _ in range(200):
        client = httpx.Client(base_url=served.openai_url, timeout=60)
        if pid_of(client) == pid:
            return client
        client.close()
    raise AssertionError(f"no connection led to process {pid}")


def complete(client: httpx.Client, prompt: str, max_tokens: int = 24) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_both_serve_and_their_channels_do_not_mix(served: Served) -> None:
    pids = [process.pid for process in shims(served)]
    assert len(pids) == 2
    prompts = [f"Number {number} is" for number in range(8)]
    alone = [complete(client_to(served, pids[0]), prompt) for prompt in prompts]
    clients = [client_to(served, pids[number % 2]) for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(complete, clients, prompts * 2))
    assert texts == alone * 2
    served.wait_idle()


def test_a_killed_one_is_started_again_and_its_requests_end(served: Served) -> None:
    free_blocks = served.wait_idle()["free_blocks"]
    victim, other = (process.pid for process in shims(served))
    doomed, spared = client_to(served, victim), client_to(served, other)
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    with (
        concurrent.futures.ThreadPoolExecutor(4) as pool,
        doomed.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream,
    ):
        next(stream.iter_lines())
        going = pool.submit(complete, spared, "The capital of France is", 120)
        psutil.Process(victim).kill()
        assert going.result(60)
    deadline = time.monotonic() + 20
    while served.status()["num_live"] and time.monotonic() < deadline:
        time.sleep(0.05)
    # Cached prefixes keep blocks, but none is held by a sequence.
    status = served.wait_idle()
    assert status["num_live"] == status["num_running"] == 0
    assert status["free_blocks"] + status["cached_blocks"] >= free_blocks
    while victim in (pids := [process.pid for process in shims(served)]) or len(pids) < 2:
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)
    fresh = next(pid for pid in pids if pid != other)
    while True:
        try:
            assert complete(client_to(served, fresh), "Hello", 4)
            break
        except (httpx.HTTPError, AssertionError):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_a_response_goes_on_whichever_process_is_asked(served: Served) -> None:
    one, two = (client_to(served, process.pid) for process in shims(served))
    body = {"model": MODEL, "max_output_tokens": 8}
    first = one.post("/v1/responses", json=body | {"input": "My name is Ada."}).json()
    again = body | {"input": "What is it?", "previous_response_id": first["id"]}
    reply = two.post("/v1/responses", json=again)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
