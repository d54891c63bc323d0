"""The OpenAPI page holds what is served, and random requests after it break nothing."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from fake_pieces import Piece, Request
from fake_triton import FakeModel, FakeTriton
from shim_thread import ShimThread

from shoal.client.openai.app import create_app
from shoal.client.openai.openapi import POSTS
from shoal.load import api_fuzz_hooks
from shoal.load.api_fuzz import command, environment, read_calls, report

MODEL = "smollm2-135m-instruct"


def answer(request: Request) -> Iterator[Piece]:
    if "pooling" in request.sampling:
        yield Piece(finish_reason="length", embedding=(0.6, 0.8))
        return
    num_choices = request.sampling.get("n", 1)
    if num_choices == 1:
        yield Piece("a", finish_reason="stop")
    for index in range(num_choices if num_choices > 1 else 0):
        is_last = index == num_choices - 1
        yield Piece("a", finish_reason="stop", index=index, is_last=is_last)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    models = {MODEL: FakeModel(script=answer)}
    with FakeTriton(**models) as triton, ShimThread(triton.url) as shim:
        shim.wait_ready()
        yield shim.url


def test_every_route_is_on_the_page() -> None:
    app = create_app()
    page = app.openapi()
    served = {
        (route.path.replace(":path}", "}"), method.lower())  # type: ignore[attr-defined]
        for route in app.routes
        for method in route.methods  # type: ignore[attr-defined]
        if method != "HEAD" and route.include_in_schema  # type: ignore[attr-defined]
    }
    described = {(path, method) for path, item in page["paths"].items() for method in item}
    assert described == served
    for item in page["paths"].values():
        for operation in item.values():
            assert set(operation["responses"]) >= {"200", "default"}


@pytest.mark.parametrize("path", POSTS)
def test_examples_work_and_answers_have_the_written_shape(url: str, path: str) -> None:
    page = httpx.get(f"{url}/openapi.json").json()
    operation = page["paths"][path]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]

    def validate(schema: dict[str, Any], value: Any) -> None:
        jsonschema.Draft202012Validator({**schema, "components": page["components"]}).validate(
            value
        )

    validate(operation["requestBody"]["content"]["application/json"]["schema"], example)
    response = httpx.post(f"{url}{path}", json=example)
    assert response.status_code == 200, response.text
    validate(
        operation["responses"]["200"]["content"]["application/json"]["schema"], response.json()
    )
    refusal = httpx.post(f"{url}{path}", json={**example, "nope": 1})
    assert refusal.status_code == 400
    default = operation["responses"]["default"]["content"]["application/json"]["schema"]
    validate(default, refusal.json())


def test_random_requests_break_nothing(url: str, tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    line = command(url, examples=3, phases="examples,fuzzing")
    done = subprocess.run(
        line, env=environment(log), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    calls = read_calls(log)
    assert not any(call.failed for call in calls)
    page = httpx.get(f"{url}/openapi.json").json()
    operations = {
        f"{method.upper()} {path}" for path, item in page["paths"].items() for method in item
    }
    assert {call.operation for call in calls} == operations
    assert f"{len(calls)} requests to {len(operations)} operations; 0 with" in report(
        calls, [1], 3, 1, True
    )


def test_fuzz_fails_for_slow_and_missing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "calls.jsonl"
    monkeypatch.setenv(api_fuzz_hooks.LOG_VARIABLE, str(log))
    case: Any = SimpleNamespace(
        path="/v1/completions", operation=SimpleNamespace(label="POST /v1/completions"), body={}
    )
    for took, status in ((4.9, 200), (5.1, 200), (0.1, 500), (10.0, None)):
        times = iter((100.0, 100.0 + took))
        monkeypatch.setattr(time, "monotonic", lambda times=times: next(times))
        response: Any = SimpleNamespace(status_code=status)
        api_fuzz_hooks.before_call(None, case, {})
        if status is None:
            api_fuzz_hooks.after_network_error(None, case, None)
            continue
        api_fuzz_hooks.after_call(None, case, response)
        if took > 5:
            with pytest.raises(AssertionError, match=r"5\.10 s"):
                api_fuzz_hooks.whole_answer_in_time(None, response, case)
        else:
            api_fuzz_hooks.whole_answer_in_time(None, response, case)
    monkeypatch.undo()
    assert case.body == {"max_tokens": api_fuzz_hooks.SMALL_LIMIT}
    assert [call.failed for call in read_calls(log)] == [False, True, True, True]
