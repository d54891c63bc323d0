"""What ``shoal models`` tells of a checkpoint, without reading its weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.describe import describe_checkpoint
from shoal.backend.weights.quantized_writer import write_quantized


def test_a_folder(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", dtype="float32")
    facts = describe_checkpoint(folder)
    assert (facts.family, facts.format, facts.context) == ("llama", "safetensors float32", 256)
    assert facts.num_bytes == (folder / "model.safetensors").stat().st_size
    # Two layers of two heads of eight, keys and values in 16 bits.
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2


def test_a_quantised_folder(tmp_path: Path) -> None:
    write_quantized(write_tiny_checkpoint(tmp_path / "tiny"), tmp_path / "q", "int8")
    assert describe_checkpoint(tmp_path / "q").format == "compressed-tensors int-quantized"


def test_the_default_model(smollm2_path: Path) -> None:
    facts = describe_checkpoint(smollm2_path)
    assert (facts.family, facts.format, facts.context) == ("llama", "GGUF Q4_1", 8192)


def test_what_fits(tmp_path: Path) -> None:
    facts = describe_checkpoint(write_tiny_checkpoint(tmp_path / "tiny"))
    assert facts.longest_context(2**30) == 256
    assert facts.longest_context(facts.num_bytes) == 0
    some = int((facts.num_bytes + 100 * facts.kv_bytes_per_token) / 0.9) + 1
    assert facts.longest_context(some) == 100


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        describe_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="JSON object"):
        describe_checkpoint(folder)
    with pytest.raises(ConfigError, match=r"neither config\.json"):
        describe_checkpoint(tmp_path)


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor .* but the file has"):
        describe_checkpoint(folder)
    weights.write_bytes(whole[:40])
    with pytest.raises(ConfigError, match=r"model\.safetensors.* is damaged or cut short"):
        describe_checkpoint(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        describe_checkpoint(folder)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="model-00001-of-00002.safetensors is missing"):
        describe_checkpoint(folder)


def test_a_gguf_that_ends_too_early_is_named(tmp_path: Path, smollm2_path: Path) -> None:
    short = tmp_path / "short.gguf"
    size = smollm2_path.stat().st_size
    with smollm2_path.open("rb") as whole, short.open("wb") as target:
        target.write(whole.read(8 * 2**20))
        target.truncate(size)  # the rest is a hole
    assert describe_checkpoint(short).num_bytes == size
    os.truncate(short, size - 1)
    with pytest.raises(ConfigError, match=rf"short\.gguf: tensor .* the file has {size - 1}"):
        describe_checkpoint(short)
    os.truncate(short, 5000)
    with pytest.raises(ConfigError, match="not a sound GGUF file"):
        describe_checkpoint(short)


def test_no_torch_is_needed() -> None:
    script = "import sys, shoal.client.cli.models_cmd; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
