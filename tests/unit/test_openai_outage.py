"""The shim when the model, the server behind it, or the shim itself goes away."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_pieces import Piece, Request, endless
from fake_triton import MODEL, FakeTriton
from shim_thread import ShimThread, wait_until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with FakeTriton() as server:
        yield server


@pytest.fixture
def shim(triton: FakeTriton) -> Iterator[ShimThread]:
    with ShimThread(triton.url, lost_after_s=0.6, forget_after_s=0.3) as running:
        running.wait_ready()
        yield running


def post(shim: ShimThread, **fields: Any) -> httpx.Response:
    return httpx.post(f"{shim.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=20)


@pytest.mark.parametrize("stream", [True, False])
def test_dead_stub_ends_open_answers(triton: FakeTriton, shim: ShimThread, stream: bool) -> None:
    begun = threading.Event()

    def never_ending(request: Request) -> Iterator[Piece]:
        yield Piece("x")
        begun.set()
        yield Piece("y", 1, "stop", delay_s=3600)

    triton.model.script = never_ending
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(shim, stream=stream)))
    thread.start()
    assert begun.wait(10)
    triton.model.stub_alive = False
    thread.join(15)
    (answer,) = answers
    if stream:
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
    assert shim.readiness() == 503
    assert post(shim).status_code == 503


def test_restarting_worker_is_not_ready_but_takes_requests(
    triton: FakeTriton, shim: ShimThread
) -> None:
    triton.model.state = "restarting"
    wait_until(lambda: shim.readiness() == 503, "still ready")
    assert post(shim, max_tokens=1).status_code == 200
    triton.model.state = "draining"
    wait_until(lambda: post(shim).status_code == 503, "still taking requests")


def test_server_down_and_back(triton: FakeTriton, shim: ShimThread) -> None:
    triton.stop()
    wait_until(lambda: shim.readiness() == 503, "still ready")
    assert post(shim).status_code == 503
    assert httpx.get(f"{shim.url}/health/live").status_code == 200
    triton.start()
    shim.wait_ready()
    assert post(shim, max_tokens=1).status_code == 200


def test_unloaded_model_is_unavailable_then_unknown(triton: FakeTriton, shim: ShimThread) -> None:
    triton.model.loaded = False
    wait_until(lambda: post(shim).status_code == 503, "still served")
    wait_until(lambda: post(shim).status_code == 404, "never forgotten")
    assert httpx.get(f"{shim.url}/v1/models").json()["data"] == []
    triton.model.loaded = True
    shim.wait_ready()


def test_what_an_unloaded_model_has_begun_goes_to_its_end(
    triton: FakeTriton, shim: ShimThread
) -> None:
    """Beats come no more from then on, and later its name is forgotten."""
    done = threading.Event()

    def script(request: Request) -> Iterator[Piece]:
        yield Piece("x")
        done.wait(30)
        yield Piece("y", finish_reason="stop")

    triton.model.script = script
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(shim)))
    thread.start()
    wait_until(lambda: triton.model.requests, "no request")
    triton.model.loaded = False
    wait_until(lambda: post(shim).status_code == 404, "never forgotten")
    time.sleep(1.0)
    done.set()
    thread.join(15)
    (answer,) = answers
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "xy"


def test_a_model_that_is_being_loaded_is_503(triton: FakeTriton) -> None:
    """A client tries again after a 503, and not after a 404."""
    triton.model.loading = True
    with ShimThread(triton.url) as shim:
        reply = post(shim)
        assert reply.status_code == 503
        assert "being loaded" in reply.json()["error"]["message"]
        triton.model.loading = False
        shim.wait_ready()


def test_no_server_at_start_is_503() -> None:
    with ShimThread("127.0.0.1:1") as shim:
        assert shim.readiness() == 503
        assert post(shim).status_code == 503
        assert httpx.get(f"{shim.url}/v1/models").json() == {"object": "list", "data": []}


def test_client_that_never_reads_counts_as_gone(triton: FakeTriton) -> None:
    def flood(request: Request) -> Iterator[Piece]:
        while True:
            yield Piece("x" * 100_000, delay_s=0.001)

    triton.model.script = flood
    body = json.dumps({**CHAT, "stream": True})
    with ShimThread(triton.url, send_timeout_s=0.3) as shim:
        shim.wait_ready()
        with socket.create_connection(("127.0.0.1", shim.port)) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            wait_until(lambda: triton.model.requests, "no request")
            assert triton.model.requests[0].cancelled.wait(20)


class ShimProcess:
    """``python -m shoal.client.openai`` with its output."""

    def __init__(self, triton: FakeTriton, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        command = [sys.executable, "-m", "shoal.client.openai", f"--port={self.port}"]
        command += [f"--triton-grpc={triton.url}", *flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONSAFEPATH": "1"}
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def status(self, path: str) -> int:
        try:
            return httpx.get(f"{self.url}{path}").status_code
        except httpx.TransportError:
            return 0


@contextlib.contextmanager
def running_process(triton: FakeTriton, *flags: str) -> Iterator[ShimProcess]:
    shim = ShimProcess(triton, *flags)
    try:
        wait_until(lambda: shim.status("/health/ready") == 200, "not ready", 60)
        yield shim
    finally:
        shim.process.kill()
        shim.process.communicate()


@pytest.fixture
def process(triton: FakeTriton) -> Iterator[ShimProcess]:
    with running_process(triton, "--drain-timeout=20") as shim:
        yield shim


def test_sigterm_drains(triton: FakeTriton, process: ShimProcess) -> None:
    release = threading.Event()

    def until_released(request: Request) -> Iterator[Piece]:
        yield Piece("a")
        release.wait(30)
        yield Piece("b", 1, "stop")

    triton.model.script = until_released
    url = f"{process.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**CHAT, "stream": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        assert "assistant" in next(lines)
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.status("/health/ready") == 503, "still ready")
        assert process.status("/health/live") == 200
        refused = httpx.post(url, json=CHAT)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "draining"
        assert process.process.poll() is None
        release.set()
        text = "\n".join(lines)
    assert '"content":"b"' in text
    assert text.strip().endswith("data: [DONE]")
    assert process.process.wait(10) == 0


def test_who_is_cut_off_by_the_drain_timeout_is_told(triton: FakeTriton) -> None:
    def never_done(request: Request) -> Iterator[Piece]:
        return endless(request) if request.inputs["stream"] else iter([Piece(delay_s=3600)])

    with running_process(triton, "--drain-timeout=0.5") as shim:
        triton.model.script = never_done
        url = f"{shim.url}/v1/chat/completions"
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(httpx.post, url, json=CHAT, timeout=30)
            with httpx.stream("POST", url, json={**CHAT, "stream": True}, timeout=30) as answer:
                lines = answer.iter_lines()
                assert "assistant" in next(lines)
                wait_until(lambda: len(triton.model.requests) == 2, "not both are running")
                shim.process.send_signal(signal.SIGTERM)
                events = [line for line in lines if line]
            assert whole.result().status_code == 503
            assert whole.result().json()["error"]["code"] == "draining"
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "draining"
        assert shim.process.wait(10) == 0


def test_second_signal_stops_at_once(triton: FakeTriton, process: ShimProcess) -> None:
    triton.model.script = endless
    url = f"{process.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**CHAT, "stream": True}, timeout=30) as answer:
        assert answer.status_code == 200
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.status("/health/ready") == 503, "still ready")
        started = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        process.process.wait(10)
        assert time.monotonic() - started < 10
    assert triton.model.requests[0].cancelled.wait(10)


def test_taken_port_names_the_flag(triton: FakeTriton) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "shoal.client.openai", f"--port={port}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 1
    assert str(port) in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr
