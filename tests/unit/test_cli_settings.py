import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.backend.engine_config import ConfigError
from shoal.client.cli.app import app
from shoal.client.cli.settings import ServeSettings, load_settings, unknown_variables


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flag_wins_over_env_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path / "serve.yaml", "http_port: 1001\ngrpc_port: 1002\nmetrics_port: 1003\n")
    environ = {"SHOAL_GRPC_PORT": "2002", "SHOAL_METRICS_PORT": "2003"}
    layered = load_settings({"metrics_port": 3003, "host": None}, file, environ)
    settings = layered.settings
    ports = (settings.openai_port, settings.http_port, settings.grpc_port, settings.metrics_port)
    assert ports == (9000, 1001, 2002, 3003)
    origins = {row.name: row.origin for row in layered.rows()}
    assert origins["openai_port"] == "default"
    assert origins["http_port"] == f"file {file}"
    assert origins["grpc_port"] == "env SHOAL_GRPC_PORT"
    assert origins["metrics_port"] == "flag --metrics-port"
    assert origins["host"] == "default"


def test_rows_show_every_setting() -> None:
    rows = load_settings({}, None, {}).rows()
    assert [row.name for row in rows] == list(ServeSettings.model_fields)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SHOAL_HTTP_PORT": "0"}, "http_port must be a whole number in [1, 65535] (got '0' from"),
        ({"SHOAL_HTTP_PORT": "nan"}, "http_port must be a whole number in [1, 65535]"),
        ({"SHOAL_LOG_LEVEL": "loud"}, "log_level must be 'debug', 'info', 'warning' or 'error'"),
        ({"SHOAL_MODEL": "a,a"}, "model names a model twice"),
        ({"SHOAL_MODEL": "../x"}, "model must name folders of the model repository"),
        ({"SHOAL_SHIM_WORKERS": "33"}, "shim_workers must be a whole number in [1, 32]"),
    ],
)
def test_bad_value_names_setting_range_and_origin(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings({}, None, environ)
    assert message in str(error.value)
    assert f"env {next(iter(environ))}" in str(error.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_settings({"http_port": -1, "grpc_port": 70000}, None, {})
    assert "http_port" in str(error.value)
    assert "grpc_port" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("htp_port: 1", "unknown setting 'htp_port'. Allowed: host, openai_port"),
        ("- a", "must hold a mapping"),
        ("a: [", "is not valid YAML at line 1"),
        ("[" * 20_000, "is not valid YAML: nested too deeply."),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "serve.yaml", text)
    with pytest.raises(ConfigError, match=r"serve\.yaml") as error:
        load_settings({}, file, {})
    assert message in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings({}, tmp_path / "none.yaml", {})


def test_models_from_environment_file_and_flag(tmp_path: Path) -> None:
    file = write(tmp_path / "serve.yaml", "model: [a, b]\n")
    assert load_settings({}, file, {}).settings.model == ["a", "b"]
    assert load_settings({}, file, {"SHOAL_MODEL": "c, d"}).settings.model == ["c", "d"]
    assert load_settings({"model": ["e"]}, file, {"SHOAL_MODEL": "c"}).settings.model == ["e"]


def test_local_addresses_of_a_wildcard_host() -> None:
    settings = ServeSettings(host="0.0.0.0", openai_port=1234, grpc_port=99)
    assert settings.openai_url == "http://127.0.0.1:1234"
    assert settings.grpc_url == "127.0.0.1:99"
    assert ServeSettings(host="::1", grpc_port=99).grpc_url == "[::1]:99"


def test_print_config_shows_values_and_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HTTP_PORT", "1234")
    result = CliRunner().invoke(app, ["serve", "--print-config", "--grpc-port=77"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.output.splitlines()}
    assert "1234" in lines["http_port"]
    assert lines["http_port"].endswith("env SHOAL_HTTP_PORT")
    assert lines["grpc_port"].endswith("flag --grpc-port")
    assert lines["host"].endswith("default")


def test_misspelt_variable_is_told_with_the_likely_one() -> None:
    environ = {"SHOAL_OPENAI_PROT": "1", "SHOAL_HTTP_PORT": "2", "OTHER": "3"}
    assert unknown_variables(environ) == [
        "The environment variable SHOAL_OPENAI_PROT is unknown and ignored: "
        "did you mean SHOAL_OPENAI_PORT?"
    ]


def test_every_variable_that_the_code_reads_is_known() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = [path for area in ("client", "backend") for path in (root / area).rglob("*.py")]
    names = {name for path in sources for name in re.findall(r"SHOAL_[A-Z_]+\b", path.read_text())}
    assert {"SHOAL_TRITONSERVER", "SHOAL_CACHE_DIR", "SHOAL_SELF_TEST"} <= names
    assert unknown_variables(dict.fromkeys(names - {"SHOAL_"}, "x")) == []


def test_misspelt_variable_is_a_warning_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_OPENAI_PROT", "1")
    app(["serve", "--print-config"], standalone_mode=False)
    output = capsys.readouterr()
    assert output.err.startswith("warning: The environment variable SHOAL_OPENAI_PROT")
    assert "warning" not in output.out


def test_version_is_an_option_and_a_command() -> None:
    option, command = (CliRunner().invoke(app, [word]) for word in ("--version", "version"))
    assert (option.exit_code, command.exit_code) == (0, 0)
    assert option.output == command.output
    assert option.output.strip()
