"""The OpenAPI page holds what is served, and random requests after it break nothing."""

import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from fake_triton import FakeModel, FakeTriton, Piece, Request
from shim_thread import ShimThread

from shoal.client.openai.app import create_app
from shoal.client.openai.openapi import POSTS
from shoal.load.api_fuzz import command

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


def test_random_requests_break_nothing(url: str) -> None:
    line = command(url, examples=3, phases="examples,fuzzing")
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
