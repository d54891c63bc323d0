"""Workers, stubs and whole servers that die; this file has a server of its own to hurt."""

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from served import (
    MODEL,
    Served,
    free_ports,
    serve,
    serve_flags,
    shoal_command,
    write_repository,
)
from triton_calls import Answer, generate


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("victim"), dtype="float32", num_kv_blocks=256) as server:
        yield server


def story(server: Served, max_tokens: int = 120) -> "asyncio.Task[Answer]":
    return asyncio.create_task(
        generate(
            server.grpc_url,
            MODEL,
            "Once upon a time",
            temperature=1.0,
            seed=3,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
    )


async def until_stepping(server: Served) -> None:
    start = len(server.steps())
    while len(server.steps()) < start + 10:
        await asyncio.sleep(0.05)


async def test_killed_worker_changes_no_text(victim: Served) -> None:
    expected = await story(victim)
    runs = [story(victim) for _ in range(3)]
    await until_stepping(victim)
    victim.find_process("shoal.backend.worker").kill()
    for answer in await asyncio.gather(*runs):
        assert answer.error is None
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        assert answer.finish_reasons == ["length"]


async def test_more_sequences_than_the_pool_holds_all_finish(victim: Served) -> None:
    """256 blocks of 16 tokens for 24 sequences of up to 270: preemption, and the same text."""
    expected = await story(victim, 250)
    before = victim.status()["num_preemptions"]
    answers = await asyncio.gather(*(story(victim, 250) for _ in range(24)))
    assert {answer.text for answer in answers} == {expected.text}
    assert victim.status()["num_preemptions"] > before
    assert victim.wait_idle()["free_blocks"] == 256


async def test_killed_stub_is_seen_and_brought_back(victim: Served) -> None:
    stream = asyncio.create_task(read_openai_stream(victim))
    await until_stepping(victim)
    victim.find_process("triton_python_backend_stub").kill()
    await asyncio.to_thread(wait_not_ready, victim)
    lines = await asyncio.wait_for(stream, 30)
    assert '"error"' in lines[-1], "an open stream must end with an error, not hang"
    victim.wait_ready(60)
    answer = await generate(victim.grpc_url, MODEL, "The capital of France is", max_tokens=4)
    assert answer.num_output_tokens == 4


@pytest.mark.parametrize("name", ["shoal.backend.worker", "triton_python_backend_stub"])
def test_a_stopped_process_is_not_ready_until_it_goes_on(victim: Served, name: str) -> None:
    victim.wait_ready(60)
    process = victim.find_process(name)
    process.suspend()
    try:
        wait_not_ready(victim)
    finally:
        process.resume()
    victim.wait_ready(60)
    assert victim.find_process(name).pid == process.pid


def wait_not_ready(server: Served) -> None:
    deadline = time.monotonic() + 10
    while server.ready():
        assert time.monotonic() < deadline, "readiness must follow the heartbeat"
        time.sleep(0.1)


async def read_openai_stream(server: Served) -> list[str]:
    body = {"model": MODEL, "prompt": "Count:", "max_tokens": 3000, "stream": True}
    url = f"{server.openai_url}/v1/completions"
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", url, json=body) as reply,
    ):
        return [line async for line in reply.aiter_lines() if line]


def test_killed_shim_and_tritonserver_are_restarted(victim: Served) -> None:
    for name in ("shoal.client.openai", "bin/tritonserver"):
        victim.find_process(name).kill()
        wait_not_ready(victim)
        victim.wait_ready(120)
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
    reply = httpx.post(f"{victim.openai_url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200


def test_brackets_without_end_do_not_end_the_server(victim: Served) -> None:
    """tritonserver parses JSON by recursion, before any code of ours sees it."""
    depth = 1_000_000
    body = '{"text_input":"a","zz":' + "[" * depth + "]" * depth + "}"
    url = f"{victim.triton_url}/v2/models/{MODEL}/generate"
    assert httpx.post(url, content=body, timeout=60).status_code == 400
    assert victim.ready()


def test_nobody_else_may_load_models(victim: Served) -> None:
    """Who may load a model may run code."""
    root = f"{victim.triton_url}/v2"
    closed = ("repository/index", f"repository/models/{MODEL}/unload", "repository/models/x/load")
    for path in closed:
        assert httpx.post(f"{root}/{path}", json={}, timeout=10).status_code == 403
    assert httpx.get(f"{root}/systemsharedmemory/status", timeout=10).status_code == 403
    assert victim.ready()


def test_sigterm_drains_open_streams(tmp_path, victim: Served) -> None:
    """The last test on this server: an open stream is finished, then all is gone."""
    body = {"model": MODEL, "prompt": "Count:", "max_tokens": 100, "ignore_eos": True}
    url = f"{victim.openai_url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        victim.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"length"' in rest[-2]
    assert victim.process.wait(60) == 0


def test_killed_supervisor_leaves_no_orphan(tmp_path) -> None:
    with serve(tmp_path, dtype="float32", num_kv_blocks=64) as server:
        family = server.descendants()
        assert len(family) >= 4, "tritonserver, its stub, the worker, the shim"
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(family, timeout=15)
        alive = [item for item in alive if item.status() != psutil.STATUS_ZOMBIE]
        for orphan in alive:
            orphan.kill()
        assert not alive


@pytest.mark.parametrize("index", range(4))
def test_a_taken_port_is_named_with_its_flag(tmp_path, index: int) -> None:
    ports = free_ports(4)
    with socket.create_server(("127.0.0.1", ports[index])):
        result = subprocess.run(
            [shoal_command(), "serve", *serve_flags(ports)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode != 0
    message = " ".join((result.stdout + result.stderr).split())
    assert str(ports[index]) in message
    assert serve_flags(ports)[index].split("=")[0] in message


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"dtype": "int3"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"weights": "no-such-model"}, "no-such-model"),
    ],
)
def test_a_bad_setting_stops_the_start_with_its_name(tmp_path, settings: dict, named: str) -> None:
    repository = write_repository(tmp_path, **settings)
    result = subprocess.run(
        [
            shoal_command(),
            "serve",
            f"--model-repository={repository}",
            *serve_flags(free_ports(4)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert named in result.stdout + result.stderr
