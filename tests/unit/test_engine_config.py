"""model.yaml: every bad setting is named, with what is allowed."""

from pathlib import Path
from typing import Any

import pytest

from shoal.backend.engine_config import ConfigError, EngineConfig


def test_defaults_need_only_weights() -> None:
    config = EngineConfig.from_dict({"weights": "some-model"})
    assert config.weights == "some-model"
    assert config.dtype == "auto"
    assert config.default_sampling == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weights": ""}, "weights"),
        ({"weights": 3}, "weights"),
        ({"dtype": "int3"}, "dtype"),
        ({"device": "abacus"}, "device"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2.5}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "max_num_batched_tokens"),
        ({"num_kv_blocks": 1}, "num_kv_blocks"),
        ({"host_kv_mib": -1}, "host_kv_mib"),
        ({"kv_disk_dir": ""}, "kv_disk_dir"),
        ({"kv_disk_dir": "kv", "prefix_caching": False}, "kv_disk_dir"),
        ({"kv_disk_dir": "kv", "host_kv_mib": 0}, "kv_disk_dir"),
        ({"kv_disk_mib": 0}, "kv_disk_mib"),
        ({"memory_ceiling_mib": 1}, "memory_ceiling_mib"),
        ({"worker_stall_timeout_s": float("nan")}, "worker_stall_timeout_s"),
        ({"step_log": 1}, "step_log"),
        ({"default_sampling": [1]}, "default_sampling"),
        ({"default_sampling": {"temperature": 5}}, r"default_sampling.*temperature"),
        ({"default_sampling": {"heat": 1}}, r"default_sampling.*heat"),
        ({"unheard_of": 1}, r"unheard_of.*max_num_seqs"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig.from_dict({"weights": "some-model", **settings})


@pytest.mark.parametrize("text", ["", "- a", "weights: [", "7", "weights: x\nweights2: y"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="model.yaml"):
        EngineConfig.from_file(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 20_000, "is not valid YAML: nested too deeply"),
        (b"weights: " + b"{a: " * 20_000, "is not valid YAML: nested too deeply"),
        (b"weights: 2026-99-99", "is not valid YAML: month"),
        (b"weights: \xff", "is not UTF-8 text"),
    ],
)
def test_a_file_that_no_parser_takes_is_one_line(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"^model.yaml {reason}"):
        EngineConfig.from_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.yaml"):
        EngineConfig.from_file(tmp_path / "model.yaml")


def test_the_shipped_model_is_sound() -> None:
    root = Path(__file__).resolve().parents[2] / "model_repository"
    paths = list(root.glob("*/*/model.yaml"))
    assert paths
    for path in paths:
        assert EngineConfig.from_file(path).weights


def test_the_number_of_choices_is_a_requests_alone():
    with pytest.raises(ConfigError, match="must not set n"):
        EngineConfig(weights="w", default_sampling={"n": 2})
