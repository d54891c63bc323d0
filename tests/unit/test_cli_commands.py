"""doctor, models, run and serve's checks before the start."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import CATALOGUE
from shoal.client.cli import doctor
from shoal.client.cli.app import app, main
from shoal.client.cli.chat import ChatError, Conversation
from shoal.client.cli.models_cmd import list_models, rows_as_text, served_models
from shoal.client.cli.serve import engine_configs, prepare_all, ready_text
from shoal.client.cli.settings import ServeSettings

MODEL = "smollm2-135m-instruct"


class FakeApi(BaseHTTPRequestHandler):
    """As much of the OpenAI API as the CLI uses. The question decides the answer."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": MODEL}]}).encode())
        else:
            self.reply(200 if self.path.startswith("/health") else 404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][-1]["content"]
        if question == "refuse":
            error = {"error": {"message": "messages[0].content must not be empty."}}
            self.reply(400, json.dumps(error).encode())
            return
        events: list[object] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": f"{len(body['messages'])} "}}]},
            {"choices": [{"delta": {"content": question.upper()}}]},
        ]
        if question == "break":
            events.append({"error": {"message": "The worker is gone."}})
        texts = [json.dumps(event, ensure_ascii=False) for event in events]
        lines = "".join(f"data: {text}\n\n" for text in texts)
        self.reply(200, (lines + "data: [DONE]\n\n").encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api_port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeApi)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def conversation(api_port: int) -> Iterator[Conversation]:
    with httpx.Client(base_url=f"http://127.0.0.1:{api_port}", trust_env=False) as client:
        yield Conversation(client, MODEL)


@pytest.fixture
def settings(tmp_path: Path) -> ServeSettings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ServeSettings(openai_port=port, cache_dir=tmp_path / "cache")


def repository(folder: Path, text: str) -> ServeSettings:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text('backend: "shoal"\n')
    (folder / "m" / "1" / "model.yaml").write_text(text)
    return ServeSettings(model_repository=folder, model=["m"], cache_dir=folder / "cache")


def test_chat_keeps_the_turns(conversation: Conversation) -> None:
    assert "".join(conversation.ask("hello")) == "1 HELLO"
    assert "".join(conversation.ask("again")) == "3 AGAIN"
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2


def test_odd_line_ends_are_text(conversation: Conversation) -> None:
    assert "".join(conversation.ask("a\u2028b\x85c")) == "1 A\u2028B\x85C"


def test_refused_turn_is_forgotten(conversation: Conversation) -> None:
    with pytest.raises(ChatError, match="must not be empty"):
        list(conversation.ask("refuse"))
    assert conversation.messages == []
    assert "".join(conversation.ask("hello")) == "1 HELLO"


def test_error_in_the_stream_is_told(conversation: Conversation) -> None:
    with pytest.raises(ChatError, match="The worker is gone"):
        list(conversation.ask("break"))
    assert conversation.messages[-1]["content"] == "1 BREAK"


def test_run_answers_one_prompt_with_the_server_that_runs(api_port: int) -> None:
    result = CliRunner().invoke(app, ["run", f"--openai-port={api_port}", MODEL, "hello"])
    assert (result.exit_code, result.output) == (0, "1 HELLO\n")


def test_run_reads_a_prompt_from_a_pipe(api_port: int) -> None:
    result = CliRunner().invoke(app, ["run", f"--openai-port={api_port}"], input="hello")
    assert result.output == "1 HELLO\n"


def test_run_of_a_model_that_is_not_served_names_those_that_are(
    api_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", "run", f"--openai-port={api_port}", "other"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert f"does not serve 'other'. It serves: {MODEL}." in capsys.readouterr().err


def test_models_tells_what_is_here_and_served(settings: ServeSettings, api_port: int) -> None:
    row = {row.name: row for row in list_models(settings)}[MODEL]
    assert (row.is_here, row.is_served) == (False, False)
    assert served_models(f"http://127.0.0.1:{api_port}") == {MODEL}


def test_models_lists_a_repository_of_ones_own(tmp_path: Path) -> None:
    rows = list_models(repository(tmp_path, "weights: /some/where.gguf\n"))
    assert {row.name: row.description for row in rows}["m"] == "weights: /some/where.gguf"
    (row,) = [row for row in rows if row.name == "m"]
    assert not row.is_here
    assert row.fault == "weights: there is no file or folder /some/where.gguf."


def test_models_says_why_one_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\3")
    rows = list_models(repository(tmp_path, f"weights: {broken}\n"))
    (line,) = [line for line in rows_as_text(rows).splitlines() if line.startswith("m ")]
    assert "cannot be read: broken.gguf is not a sound GGUF file (the file is cut short)" in line
    assert " no " in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights: a\nkv_cach: 1\n", "unknown setting 'kv_cach'"),
        ("weights: some/where.gguf\n", "weights must be an absolute path"),
        (f"weights: {MODEL}\nstep_log: steps.jsonl\n", "step_log must be an absolute path"),
    ],
)
def test_bad_engine_settings_end_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_configs(repository(tmp_path, text))
    assert message in str(error.value)
    assert str(tmp_path / "m" / "1") in str(error.value)


def test_weights_that_are_not_there_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr("shoal.client.cli.serve.repair_runtime", lambda *_: started.append("it"))
    monkeypatch.setattr("shoal.client.cli.serve.prepare_runtime", lambda *_: "runtime")
    weights = tmp_path / "no.gguf"
    settings = repository(tmp_path, f"weights: {weights}\n")
    with pytest.raises(ConfigError) as error:
        prepare_all(settings)
    text = str(error.value)
    assert f"{tmp_path / 'm' / '1' / 'model.yaml'}: weights: there is no" in text
    assert f"{weights}. Set it to" in text
    assert "\n" not in text
    assert started == []
    weights.write_bytes(b"GGUF")
    assert prepare_all(settings) == "runtime"
    assert started == ["it"]


def test_unknown_model_names_those_of_the_repository(tmp_path: Path) -> None:
    settings = repository(tmp_path, f"weights: {MODEL}\n").model_copy(update={"model": ["other"]})
    with pytest.raises(ConfigError, match="has no model 'other'.*It has: m"):
        engine_configs(settings)


def test_highest_version_counts(tmp_path: Path) -> None:
    settings = repository(tmp_path, "weights: [broken\n")
    (tmp_path / "m" / "10").mkdir()
    (tmp_path / "m" / "10" / "model.yaml").write_text(f"weights: {MODEL}\nmax_num_seqs: 7\n")
    assert engine_configs(settings)[0].max_num_seqs == 7


def test_ready_text_names_every_endpoint() -> None:
    text = ready_text(
        ServeSettings(openai_port=1, http_port=2, grpc_port=3, metrics_port=4), Path("/l")
    )
    for part in ("127.0.0.1:1/v1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4/metrics", "curl -N"):
        assert part in text


def test_ready_text_tells_how_to_chat() -> None:
    def command(**values: object) -> str:
        lines = ready_text(ServeSettings(**values), Path("/l")).splitlines()
        (line,) = [line for line in lines if "shoal run" in line]
        return line.partition("  (")[0].strip()

    assert command() == f"shoal run {MODEL}"
    assert command(openai_port=9100) == f"shoal run {MODEL} --openai-port 9100"
    assert command(host="0.0.0.0") == f"shoal run {MODEL}"
    assert command(host="10.0.0.7") == f"SHOAL_HOST=10.0.0.7 shoal run {MODEL}"
    closed = command(keys_file="/k.yaml", tls_cert="/c.pem")
    assert closed == f"SHOAL_API_KEY=KEY SHOAL_TLS_CERT=/c.pem shoal run {MODEL}"


def by_name(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in findings}


def test_doctor_on_an_empty_cache_advises_to_pull(
    settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_torch", lambda _: iter(()))
    monkeypatch.setattr("shoal.client.cli.runtime.SYSTEM_ROOT", Path("/nowhere"))
    findings = by_name(doctor.examine(settings))
    for name in ("tritonserver", f"model {MODEL}"):
        assert findings[name].status == "warning"
        assert "shoal pull" in findings[name].fix


def test_doctor_names_a_taken_port_and_its_flag(settings: ServeSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = settings.model_copy(update={"grpc_port": server.getsockname()[1]})
        findings = [item for item in doctor.check_ports(taken) if "gRPC" in item.detail]
    assert findings[0].status == "problem"
    assert "--grpc-port" in findings[0].fix


def test_doctor_allows_ports_of_a_shoal_that_runs(settings: ServeSettings, api_port: int) -> None:
    running = settings.model_copy(update={"openai_port": api_port})
    assert [item.status for item in doctor.check_ports(running)] == ["ok"]


def test_doctor_sees_a_python_without_shared_library(
    settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.client.cli.runtime.shared_libpython", lambda: None)
    finding = by_name(list(doctor.check_python(settings)))["libpython"]
    assert finding.status == "problem"
    assert "apt-get install libpython" in finding.fix
    assert doctor.has_problem([finding])


def test_doctor_sees_damaged_weights(tmp_path: Path, settings: ServeSettings) -> None:
    path = CATALOGUE[MODEL].path(settings.cache_dir)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    finding = next(doctor.check_models(settings))
    assert finding.status == "problem"
    assert "is damaged" in finding.detail


def test_doctor_sees_a_broken_torch(
    settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libfoo.so is missing')")
    finding = next(doctor.check_torch(settings))
    assert (finding.status, finding.detail) == ("problem", "ImportError: libfoo.so is missing")


def test_doctor_sees_an_accelerator_that_torch_cannot_use(
    settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = 'print(\'{"version": "1", "device": "cpu", "name": "none"}\')'
    monkeypatch.setattr(doctor, "_TORCH_PROBE", probe)
    monkeypatch.setattr("shoal.client.cli.runtime.has_gpu", lambda: True)
    assert [item.status for item in doctor.check_torch(settings)] == ["ok", "warning"]


def test_command_line_starts_without_heavy_imports() -> None:
    code = (
        "import sys; from shoal.client.cli.app import app\n"
        "heavy = {'torch', 'numpy', 'grpc', 'tritonclient', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import shoal.client.cli.serve, shoal.client.cli.supervisor, shoal.client.cli.chat\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
