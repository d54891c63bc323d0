"""Quantised copies of a checkpoint: read by transformers and by us as the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoint import write_tiny_checkpoint
from transformers import AutoModelForCausalLM

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights import quantized_writer
from shoal.backend.weights.quantized_writer import SCHEMES, write_quantized
from shoal.backend.weights.safetensors import SafetensorsCheckpoint
from shoal.kernels.quantized_weights import QuantizedWeight

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny", hidden_size=64, model_type="llama")


def weights(folder: Path) -> dict[str, Any]:
    source = SafetensorsCheckpoint(folder)
    return {name: source.load(name, torch.bfloat16) for name in source.names()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_same_weights(tmp_path: Path, folder: Path, scheme: str) -> None:
    target = tmp_path / "new" / scheme
    write_quantized(folder, target, scheme)
    assert sorted(path.name for path in target.parent.iterdir()) == [scheme]
    ours, before = weights(target), weights(folder)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    theirs(torch.tensor([[3, 4, 5]]))  # what is packed is unpacked by now
    layer = theirs.model.layers[1]
    for module in MODULES:
        name = f"model.layers.1.{module}.weight"
        weight = ours[name]
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.dequantize(), layer.get_submodule(module).weight.data.bfloat16())
        assert (weight.dequantize() - before[name]).abs().max() < 1
    assert torch.equal(ours["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_large_checkpoints_come_in_shards(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(folder, tmp_path / "whole", "int8")
    monkeypatch.setattr(quantized_writer, "SHARD_BYTES", 20_000)
    write_quantized(folder, tmp_path / "parts", "int8")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(whole) > {"model.norm.weight"}
    assert weights(tmp_path / "whole").keys() == weights(tmp_path / "parts").keys()


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(
    tmp_path: Path, folder: Path
) -> None:
    with pytest.raises(ConfigError, match="int8, int4, fp8"):
        write_quantized(folder, tmp_path / "new", "int3")
    with pytest.raises(ConfigError, match=r"config\.json and safetensors"):
        write_quantized(tmp_path, tmp_path / "new", "int8")
    with pytest.raises(ConfigError, match="exists already"):
        write_quantized(folder, folder, "int8")
    write_quantized(folder, tmp_path / "once", "int8")
    with pytest.raises(ConfigError, match="quantised already"):
        write_quantized(tmp_path / "once", tmp_path / "twice", "int8")
    assert not (tmp_path / "twice").exists()
    assert not list(tmp_path.glob(".quantizing-*"))


def test_a_target_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target in (tmp_path / "file" / "new", tmp_path / "link"):
        with pytest.raises(ConfigError, match=rf"{target} cannot be written: [^\n]+\.$"):
            write_quantized(folder, target, "int8")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "tiny"}
