"""What the shim takes and what it refuses: fields, bodies, heads, paths."""

import json
import socket
from typing import Any

import httpx
import pytest
from fake_triton import MODEL, FakeModel
from shim_calls import CHAT, COMPLETIONS, MESSAGES, chat, completion, refusal
from shim_thread import ShimThread


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 10**30}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 0}, "n"),
        ({"n": 33}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"frequency_penalty": "0.5"}, "frequency_penalty"),
        ({"presence_penalty": [-1]}, "presence_penalty"),
        ({"repetition_penalty": True}, "repetition_penalty"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"nonsense": 1}, "nonsense"),
        ({"nonsense": None}, "nonsense"),
    ],
)
def test_bad_fields_are_named(
    http: httpx.Client, model: FakeModel, fields: dict[str, Any], param: str
) -> None:
    for stream in ({}, {"stream": True}):
        error = refusal(http.post(CHAT, json={**chat(**stream), **fields}), 400, param)
        assert param.split("[")[0] in error["message"]
    assert not model.requests


def test_stream_options_need_a_stream(http: httpx.Client) -> None:
    body = chat(stream_options={"include_usage": True})
    refusal(http.post(CHAT, json=body), 400, "stream_options")


def test_neutral_values_are_as_if_absent(http: httpx.Client, model: FakeModel) -> None:
    body = chat(
        n=None,
        logprobs=False,
        top_logprobs=None,
        response_format=None,
        frequency_penalty=None,
        logit_bias=None,
        max_tokens=None,
        temperature=None,
        stop=None,
        user="me",
        store=False,
    )
    assert http.post(CHAT, json=body).status_code == 200
    assert model.requests[0].sampling == {}


def test_completions_are_not_cut_short_by_default(http: httpx.Client, model: FakeModel) -> None:
    http.post(COMPLETIONS, json=completion(max_tokens=None))
    http.post(COMPLETIONS, json=completion(max_tokens=7))
    assert [item.sampling.get("max_tokens") for item in model.requests] == [None, 7]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (3, "prompt"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
        ([1, "a"], "prompt"),
        ([1, True], "prompt"),
        ([1.5], "prompt[0]"),
        ([-1], "prompt"),
        ([[2**40]], "prompt[0]"),
        (["a"] * 33, "prompt"),
    ],
)
def test_bad_prompts_are_named(http: httpx.Client, prompt: Any, param: str) -> None:
    refusal(http.post(COMPLETIONS, json=completion(prompt=prompt)), 400, param)


def test_missing_fields_are_named(http: httpx.Client) -> None:
    refusal(http.post(CHAT, json={"messages": MESSAGES}), 400, "model")
    refusal(http.post(CHAT, json={"model": MODEL}), 400, "messages")
    refusal(http.post(COMPLETIONS, json={"model": MODEL}), 400, "prompt")


@pytest.mark.parametrize("name", ["nope", "onnx", "", "x" * 5000])
def test_unknown_model_is_404(http: httpx.Client, name: str) -> None:
    response = http.post(CHAT, json=chat(model=name))
    assert refusal(response, 404, "model")["code"] == "model_not_found"
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"1", 400),
        (b'"x"', 400),
        (b"null", 400),
        (b'{"model": "\xff"}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b"[" * 100_000, 400),
        (b"[" * 500 + b"]" * 500, 400),
        (b'{"messages": ' + b"[" * 32 + b"]" * 32 + b"}", 400),
        (b" " * (4 * 1024 * 1024 + 1), 413),
    ],
)
def test_bad_bodies(http: httpx.Client, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    refusal(http.post(CHAT, content=body, headers=headers), status, None)
    assert http.post(CHAT, json=chat()).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_named(http: httpx.Client, number: str) -> None:
    body = f'{{"model": "fake", "messages": [], "temperature": {number}}}'
    headers = {"content-type": "application/json"}
    refusal(http.post(CHAT, content=body, headers=headers), 400, "temperature")


def test_chunked_body_is_capped_too(http: httpx.Client) -> None:
    pieces = (b" " * 65536 for _ in range(100))
    response = http.post(CHAT, content=pieces, headers={"content-type": "application/json"})
    refusal(response, 413, None)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_wrong_media_type_is_415(http: httpx.Client, headers: dict[str, str]) -> None:
    refusal(http.post(CHAT, content=json.dumps(chat()).encode(), headers=headers), 415, None)


def test_routing_errors_have_the_same_form(http: httpx.Client) -> None:
    refusal(http.get("/nope"), 404, None)
    response = http.get(CHAT)
    refusal(response, 405, None)
    assert response.headers["allow"] == "POST"
    assert response.headers["allow"] == "POST"
    assert "Allowed: POST." in response.json()["error"]["message"]
    response = http.delete("/v1/models")
    assert "Allowed: GET, HEAD." in refusal(response, 405, None)["message"]
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models", "/health/live", "/health/ready"])
def test_trailing_slash_is_no_redirect(http: httpx.Client, path: str) -> None:
    response = http.get(f"{path}/", headers={"host": "evil.example"})
    refusal(response, 404, response.json()["error"]["param"])
    assert "location" not in response.headers


@pytest.mark.parametrize(
    "path", ["/health/live", "/health/ready", "/v1/models", f"/v1/models/{MODEL}"]
)
def test_head_answers_as_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert head.status_code == get.status_code == 200
    assert (head.content, head.headers["content-length"]) == (b"", str(len(get.content)))


def test_request_id(http: httpx.Client, model: FakeModel) -> None:
    response = http.post(CHAT, json=chat(), headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert model.requests[0].id == "abc-1"
    for bad in ("a b", "x" * 200, "<script>"):
        given = http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert given != bad
        assert len(given) == 32


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health/live").json() == {"status": "live"}
    ready = http.get("/health/ready").json()
    assert (ready["ready"], ready["models"]) == ([MODEL], {MODEL: "ready"})
    health = http.get("/health").json()
    assert health["models"][MODEL]["max_model_len"] == 128
    assert health["models"][MODEL]["self_test"] == {"ok": True, "num_prompts": 4}
    assert http.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"x: " + b"y" * 70_000 + b"\r\n", 431),
        (b"".join(b"h%d: v\r\n" % i for i in range(150)), 431),
        (b"bad header\r\n", 400),
    ],
)
def test_bad_heads(running: ShimThread, head: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'{"error":' in answer


def test_large_body_on_one_connection_is_no_head(http: httpx.Client, model: FakeModel) -> None:
    messages = [{"role": "user", "content": "x" * 300_000}]
    for _ in range(3):
        assert http.post(CHAT, json=chat(messages=messages)).status_code == 200
    assert len(model.requests) == 3


def test_headers_say_whose_a_request_is(http: httpx.Client, model: FakeModel) -> None:
    headers = {"X-Shoal-Tenant": "acme", "X-Shoal-Slo-Class": "gold", "X-Other": "1"}
    assert http.post(COMPLETIONS, json=completion(), headers=headers).status_code == 200
    said = {k: v for k, v in model.requests[0].parameters.items() if k.startswith("x-")}
    assert said == {"x-shoal-tenant": "acme", "x-shoal-slo-class": "gold"}
