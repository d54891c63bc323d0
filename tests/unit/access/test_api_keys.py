"""API keys: the file, who is let in, and as whom."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_pieces import Piece, Request
from fake_triton import MODEL, FakeTriton
from key_calls import CHAT, bearer, body
from shim_thread import ShimThread, wait_until
from typer.testing import CliRunner

from shoal.backend.engine_config import ConfigError
from shoal.client.cli.app import app
from shoal.client.cli.keys import add_key, revoke_key
from shoal.client.cli.models_cmd import served_models
from shoal.client.cli.serve import check_access
from shoal.client.cli.settings import ServeSettings, load_settings
from shoal.client.openai.api_keys import ApiKey, KeyFile, KeyRing, hash_key, read_keys
from shoal.client.openai.app import create_app
from shoal.client.openai.settings import ShimSettings

HASH = "0f" * 32


# The file


def test_a_key_is_kept_only_as_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.yaml"
    key = add_key(path, "alice", {"requests_per_minute": 5})
    assert key.startswith("sk-shoal-")
    assert len(key) > 50
    assert key.removeprefix("sk-shoal-") not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    ring = read_keys(path)
    assert ring.keys == (ApiKey(name="alice", sha256=hash_key(key), requests_per_minute=5),)
    assert ring.find(key) == ring.keys[0]
    assert ring.find(key[:-1]) is None
    assert ring.find("") is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "list named keys"),
        ("keys: 3", "list named keys"),
        ("keys: []\nmore: 1", "list named keys"),
        ("keys: [{name: a}]", r"keys\[0\]\.sha256"),
        ("keys: [{name: a, sha256: plain-text-key}]", r"keys\[0\]\.sha256"),
        (f"keys: [{{name: 'a b', sha256: {HASH}}}]", r"keys\[0\]\.name"),
        (f"keys: [{{name: a, sha256: {HASH}, rpm: 3}}]", r"keys\[0\]\.rpm"),
        (f"keys: [{{name: a, sha256: {HASH}, max_concurrent: 0}}]", "max_concurrent"),
        (f"keys: [{{name: a, sha256: {HASH}, tenant: default}}]", "without a key"),
        (f"keys: [{{name: default, sha256: {HASH}}}]", "without a key"),
        (f"keys: [{{name: a, sha256: {HASH}}}, {{name: b, sha256: {HASH}}}]", "sha256"),
        ("keys: [", "line 1"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=names):
        read_keys(path)
    with pytest.raises(ConfigError, match=names):
        create_app(ShimSettings(keys_file=path))


def test_a_file_gone_bad_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, "a", {})
    seen: list[KeyRing] = []
    file = KeyFile(path, seen.append)
    file.check()
    assert len(seen) == 1
    path.write_text("keys: [{}]")
    file.check()
    path.unlink()
    file.check()
    assert len(seen) == 1
    add_key(path, "b", {})
    file.check()
    assert [key.name for key in seen[1].keys] == ["b"]


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    monkeypatch.setenv("SHOAL_KEYS_FILE", str(path))
    run = CliRunner().invoke
    made = run(app, ["keys", "add", "bob", "--tenant", "sales", "--tokens-per-minute", "1000"])
    assert read_keys(path).find(made.output.strip()) is not None
    listed = run(app, ["keys", "list"]).output.splitlines()
    assert listed[1].split()[:5] == ["bob", "sales", "-", "-", "1000"]
    for wrong in (["add", "bob"], ["add", "a b"], ["add", "c", "--max-concurrent", "0"]):
        assert isinstance(run(app, ["keys", *wrong]).exception, ConfigError)
    assert run(app, ["keys", "revoke", "bob"]).exit_code == 0
    assert read_keys(path).keys == ()
    with pytest.raises(ConfigError, match="There are: none"):
        revoke_key(path, "bob")
    with pytest.raises(ConfigError, match="--keys-file"):
        add_key(None, "x", {})


# Who is let in


def test_every_route_but_liveness_needs_a_key(http: httpx.Client, shim: ShimThread) -> None:
    routes = [
        (method, route.path.replace("{model_id:path}", MODEL))
        for route in shim.app.routes
        for method in route.methods
    ]
    routes += [("GET", "/nowhere"), ("GET", "/health/live/x"), ("GET", "//health/live")]
    assert len(routes) > 12
    for method, path in routes:
        is_open = path in ("/health/live", "/health/ready")
        status = http.request(method, path).status_code
        assert (status == 200) if is_open else (status == 401), (method, path)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer sk-shoal-nonsense"},
        {"authorization": "Basic YTpi"},
        {"authorization": "Bearer " + "x" * 600},
        {"authorization": "Bearer \xff\xfe"},
        {"x-api-key": "anything"},
    ],
)
def test_a_refusal_says_what_to_do(http: httpx.Client, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    reply = http.post(CHAT, json=body(), headers=encoded)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["connection"] == "close"
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "shoal keys add" in error["message"]


def test_two_authorization_headers_are_refused(http: httpx.Client, make_key: Any) -> None:
    key = make_key("twice")
    pairs = [("authorization", f"Bearer {key}"), ("authorization", "Bearer other")]
    assert http.get("/version", headers=pairs).status_code == 401


def test_the_host_header_opens_nothing(http: httpx.Client) -> None:
    for host in ("x/health/live", "x/health/live?", "[::1", "a/health/live#"):
        assert http.get("/v1/models", headers={"host": host}).status_code in (400, 401)


def test_the_log_names_the_key_and_never_shows_it(
    http: httpx.Client, make_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = make_key("logged")
    with caplog.at_level("INFO", "shoal"):
        http.get("/version", headers=bearer(key))
        http.get("/version", headers=bearer("wrong-one"))
        wait_until(lambda: " - GET /version 401" in caplog.text, "each request is logged")
    assert " logged GET /version 200" in caplog.text
    assert key not in caplog.text
    assert "wrong-one" not in caplog.text


def test_a_key_decides_tenant_and_tier(
    http: httpx.Client, triton: FakeTriton, make_key: Any
) -> None:
    spoof = {"x-shoal-tenant": "bank", "x-shoal-slo-class": "interactive"}
    spoof |= {"x-shoal-cache-salt": "mine", "x-shoal-timeout": "5000"}
    for name, limits in (("plain", {}), ("full", {"tenant": "sales", "slo_class": "batch"})):
        key = make_key(name, **limits)
        assert http.post(CHAT, json=body(), headers=bearer(key) | spoof).status_code == 200
    plain, full = (request.parameters for request in triton.model.requests)
    assert plain["x-shoal-tenant"] == "plain"
    assert "x-shoal-slo-class" not in plain
    assert (full["x-shoal-tenant"], full["x-shoal-slo-class"]) == ("sales", "batch")
    assert (full["x-shoal-cache-salt"], full["x-shoal-timeout"]) == ("mine", "5000")


def test_without_a_key_file_headers_decide(triton: FakeTriton) -> None:
    with ShimThread(triton.url) as open_shim:
        open_shim.wait_ready()
        headers = {"x-shoal-tenant": "bank", "authorization": "Bearer whatever"}
        reply = httpx.post(open_shim.url + CHAT, json=body(), headers=headers)
        assert reply.status_code == 200
        assert "access-control-allow-origin" not in reply.headers
    assert triton.model.requests.pop().parameters["x-shoal-tenant"] == "bank"


def test_revoking_ends_no_running_request(
    http: httpx.Client, triton: FakeTriton, make_key: Any, keys_file: Path
) -> None:
    def slow(request: Request) -> Iterator[Piece]:
        for index in range(20):
            yield Piece("x", delay_s=0.03, finish_reason="stop" if index == 19 else None)

    triton.model.script = slow
    key = make_key("leaver")
    with http.stream("POST", CHAT, json=body(stream=True), headers=bearer(key)) as reply:
        lines = reply.iter_lines()
        next(lines)
        revoke_key(keys_file, "leaver")
        wait_until(lambda: http.get("/version", headers=bearer(key)).status_code == 401, "revoked")
        assert list(lines)[-2:] == ["data: [DONE]", ""]


# Browsers


def test_only_listed_origins_may_call(http: httpx.Client, make_key: Any) -> None:
    preflight = {"access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "authorization, content-type"
    allowed = http.options(CHAT, headers=preflight | {"origin": "https://chat.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    evil = http.options(CHAT, headers=preflight | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in evil.headers
    refused = http.get("/v1/models", headers={"origin": "https://chat.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"


# Settings of `shoal serve`


def test_with_keys_tritons_ports_stay_on_this_machine(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    settings = ServeSettings(host="0.0.0.0", keys_file=keys)
    assert [use.host for use in settings.port_uses] == ["0.0.0.0", *["127.0.0.1"] * 3]
    assert settings.grpc_url == "127.0.0.1:8001"
    assert not settings.open_to_all
    told = ServeSettings(host="0.0.0.0", keys_file=keys, triton_host="10.0.0.1")
    assert told.grpc_url == "10.0.0.1:8001"
    without = ServeSettings(host="0.0.0.0")
    assert {use.host for use in without.port_uses} == {"0.0.0.0"}
    assert without.open_to_all
    assert not ServeSettings(host="::1").open_to_all


def test_serve_refuses_what_the_endpoint_could_not_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        check_access(ServeSettings(keys_file=tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="both or none"):
        check_access(ServeSettings(tls_key=tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match="origins such as"):
        load_settings({"cors_origin": ["https://a.example/path"]}, None, {})
    several = load_settings({}, None, {"SHOAL_CORS_ORIGIN": "https://a.example, *"}).settings
    assert several.cors_origin == ["https://a.example", "*"]


def test_own_commands_send_their_key(
    shim: ShimThread, make_key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["run", f"--openai-port={shim.port}", MODEL, "hello"]
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    assert served_models(shim.url) == frozenset()
    with pytest.raises(ConfigError, match="set SHOAL_API_KEY"):
        CliRunner().invoke(app, ask, catch_exceptions=False)
    monkeypatch.setenv("SHOAL_API_KEY", make_key("own"))
    assert served_models(shim.url) == {MODEL}
    assert CliRunner().invoke(app, ask).output == "w0 w1 w2 w3 \n"


# Heads of requests


def test_large_heads_are_431(http: httpx.Client, make_key: Any) -> None:
    many = {f"x-{index}": "1" for index in range(101)}
    for headers in (many, {"x-large": "x" * 70_000}, {"authorization": "Bearer " + "x" * 70_000}):
        reply = http.get("/v1/models", headers=headers)
        assert reply.status_code == 431
        assert reply.json()["error"]["code"] == "headers_too_large"
    few = {f"x-{index}": "1" * 500 for index in range(80)}
    assert http.get("/v1/models", headers=few | bearer(make_key("heads"))).status_code == 200
