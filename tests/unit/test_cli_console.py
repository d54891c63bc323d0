import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.backend.engine_config import ConfigError
from shoal.client.cli.console import Console, LoadingLine, line_level
from shoal.client.cli.run_dir import RunDir
from shoal.client.cli.triton_control import load_reason


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ('I1129 13:01:16.990565 7526 model_lifecycle.cc:472] "loading: tiny:1"', "debug"),
        ('W1129 13:01:16.990565 7526 x.cc:1] "careful"', "warning"),
        ('E1129 13:01:16.990565 7526 x.cc:1] "broken"', "error"),
        ('E1129 13:01:16.990565 1 s.cc:2] "CudaDriverHelper has not been initialized."', "debug"),
        ("| server_id | triton |", "debug"),
        ("", "debug"),
        ("shoal smollm2/1 INFO serving", "info"),
        ("shoal smollm2/1 ERROR worker 1 is gone", "error"),
        ("terminate called after throwing an instance", "info"),
    ],
)
def test_level_of_a_childs_line(line: str, level: str) -> None:
    assert line_level("tritonserver", line) == level


def test_lines_below_the_level_are_not_shown() -> None:
    output = io.StringIO()
    console = Console(level="warning", stream=output)
    console.event("starting")
    console.child_line("openai-api", "INFO fine")
    console.child_line("openai-api", "ERROR bad")
    assert output.getvalue() == "[openai-api] ERROR bad\n"


def test_json_lines() -> None:
    output = io.StringIO()
    Console(log_format="json", stream=output).child_line("openai-api", 'ERROR "é"')
    line = json.loads(output.getvalue())
    assert (line["level"], line["process"], line["message"]) == ("error", "openai-api", 'ERROR "é"')


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_one_line_on_a_terminal() -> None:
    output = Terminal()
    console = Console(stream=output)
    console.child_line("tritonserver", "shoal m/1 INFO loading: weights 50% of 92 MiB")
    console.child_line("tritonserver", "shoal m/1 INFO loading: weights 100% of 92 MiB")
    assert "\n" not in output.getvalue()
    assert "[##########          ] 46 of 92 MiB" in output.getvalue()
    console.event("ready")
    assert output.getvalue().endswith("\x1b[Kready\n")


def test_loading_line_tells_the_time_left() -> None:
    output = io.StringIO()
    line = LoadingLine(output)
    line.draw("weights", 0, 10)
    line.started -= 30.0
    line.draw("weights", 50, 10)
    assert "5 of 10 MiB, 30 s left" in output.getvalue()


def test_closed_output_does_not_stop_anything() -> None:
    output = io.StringIO()
    console = Console(stream=output)
    output.close()
    console.event("nobody reads this")


def test_reason_of_a_failed_load_is_the_backends() -> None:
    text = (
        "[StatusCode.INVALID_ARGUMENT] load failed for model 'm': version 1 is at UNAVAILABLE "
        "state: Internal: TritonModelException: model 'm': weights: there is no file /x.gguf.\n\n"
        "At:\n  /a/b/model.py(63): initialize\n;\n"
    )
    assert load_reason("m", text) == "weights: there is no file /x.gguf."


def test_reason_of_an_unknown_model() -> None:
    text = "[StatusCode.INTERNAL] failed to load 'm', failed to poll from model repository"
    assert "no folder 'm'" in load_reason("m", text)


def test_unknown_reason_is_kept_whole() -> None:
    assert load_reason("m", "[StatusCode.UNAVAILABLE] gone") == "[StatusCode.UNAVAILABLE] gone"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets need short paths; those of tmp_path may be too long."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        yield Path(folder)


def test_run_dir_is_private_and_for_one(short_path: Path) -> None:
    path = short_path / "run"
    first, second = RunDir(path), RunDir(path)
    first.claim()
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="Another shoal serve uses"):
        second.claim()
    first.release()
    second.claim()
    second.release()


def test_run_dir_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        RunDir(tmp_path / ("x" * 60)).claim()


def test_link_in_place_of_the_run_dir_is_refused(short_path: Path) -> None:
    link = short_path / "run"
    link.symlink_to(short_path)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        RunDir(link).claim()
