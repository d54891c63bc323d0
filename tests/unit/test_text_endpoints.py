"""/tokenize, /detokenize and versions of a model, over real HTTP."""

from collections.abc import Iterator

import httpx
import pytest
from fake_triton import MODEL, FakeModel, FakeTriton
from shim_thread import ShimThread, wait_until


@pytest.fixture(scope="module")
def triton() -> Iterator[FakeTriton]:
    with FakeTriton(fake=FakeModel(), two=FakeModel(versions=("1", "3"))) as server:
        yield server


@pytest.fixture(scope="module")
def http(triton: FakeTriton) -> Iterator[httpx.Client]:
    with ShimThread(triton.url) as shim:
        shim.wait_ready()
        with httpx.Client(base_url=shim.url, timeout=20) as client:
            yield client


def test_tokenize_text_and_chat(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "one three"}).json()
    expected = {"count": 2, "max_model_len": 128, "tokens": [3, 5], "token_strs": None}
    assert answer == expected
    body = {"model": MODEL, "prompt": "one", "return_token_strs": True}
    assert http.post("/tokenize", json=body).json()["token_strs"] == ["one"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/tokenize", json=body).json()["count"] > 0


def test_detokenize(http: httpx.Client) -> None:
    answer = http.post("/detokenize", json={"model": MODEL, "tokens": [1, 2]})
    assert answer.json() == {"prompt": "x xx"}
    assert http.post("/detokenize", json={"model": MODEL, "tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "refused"}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
    ],
)
def test_refused_by_name(http: httpx.Client, path: str, body: dict, param: str) -> None:
    answer = http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_versions_are_listed_and_asked_for(http: httpx.Client, triton: FakeTriton) -> None:
    def listed() -> set[str]:
        return {entry["id"] for entry in http.get("/v1/models").json()["data"]}

    wait_until(lambda: listed() == {MODEL, "two", "two@1", "two@3"}, "versions were not listed")
    for name, version in (("two", ""), ("two@1", "1"), ("two@3", "3")):
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        answer = http.post("/v1/completions", json=body)
        assert answer.json()["model"] == name
        assert triton.models["two"].requests[-1].version == version
        assert http.get(f"/v1/models/{name}").json()["id"] == name


def test_the_only_version_has_a_name_too(http: httpx.Client, triton: FakeTriton) -> None:
    body = {"model": f"{MODEL}@1", "prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert triton.model.requests[-1].version == "1"
    assert f"{MODEL}@1" not in {entry["id"] for entry in http.get("/v1/models").json()["data"]}
    for wrong in (f"{MODEL}@2", f"{MODEL}@", f"{MODEL}@x", "@1", f"{MODEL}@1@1"):
        answer = http.post("/v1/completions", json={**body, "model": wrong})
        assert answer.status_code == 404, wrong
