"""Checkpoints quantised elsewhere: their weights equal, bit for bit, what the format's own library
or its public layout says, and stay packed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.loader import load_model
from shoal.backend.weights.safetensors import SafetensorsCheckpoint
from shoal.kernels.quantized_weights import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight

GROUP = 16
MODULE = "model.layers.0.mlp.down_proj"  # [32, 64]
SHAPE = (32, 64)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the values of a word, from its low bits


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(9)) * 0.1 + 0.01).to(dtype)


def pack_words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[n, k] of 0 to 15 to int32 [n, k / 8]."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, idx in enumerate(order):
        words |= values[:, idx::8] << (4 * place)
    return words.to(torch.int32)


def checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A tiny model of which one module is quantised."""
    write_tiny_checkpoint(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    plain = load_file(folder / "model.safetensors")
    del plain[f"{MODULE}.weight"]
    packed = {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(plain | packed, folder / "model.safetensors")
    return folder


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    weight = SafetensorsCheckpoint(folder).load(f"{MODULE}.weight", torch.float32)
    load_model(folder, torch.float32)
    if isinstance(weight, QuantizedWeight):
        return replace(weight, dtype=dtype)  # type: ignore[type-var]
    return weight


def test_awq(tmp_path: Path) -> None:
    values, zeros = integers(16, 64, 32), integers(16, 64 // GROUP, 32, seed=1)  # [in, out]
    scales = scales_of(64 // GROUP, 32)
    tensors = {
        "qweight": pack_words(values, AWQ_ORDER),
        "qzeros": pack_words(zeros, AWQ_ORDER),
        "scales": scales,
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    weight = loaded(checkpoint(tmp_path / "m", config, tensors), torch.float16)
    assert isinstance(weight, Int4Weight)
    spread = [tensor.repeat_interleave(GROUP, 0) for tensor in (zeros, scales)]
    assert torch.equal(weight.dequantize(), ((values - spread[0]) * spread[1]).t())


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(tmp_path: Path, form: str, act_order: bool) -> None:
    values, zeros = integers(16, 64, 32), integers(15, 64 // GROUP, 32, seed=1) + 1
    scales = scales_of(64 // GROUP, 32)
    groups = torch.arange(64) // GROUP
    if act_order:
        groups = groups[torch.randperm(64, generator=torch.Generator().manual_seed(2))]
    tensors = {
        "qweight": pack_words(values.t()).t(),
        "qzeros": pack_words(zeros - 1 if form == "gptq" else zeros % 16),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": form}
    weight = loaded(checkpoint(tmp_path / "m", config, tensors), torch.float16)
    assert isinstance(weight, Int4Weight)
    assert (weight.columns is not None) == act_order
    stored = zeros if form == "gptq" else zeros % 16
    assert torch.equal(weight.dequantize(), ((values - stored[groups]) * scales[groups]).t())


def test_gptq_with_uneven_groups_is_dense(tmp_path: Path) -> None:
    values, zeros = integers(16, 64, 32), integers(15, 64 // GROUP, 32, seed=1)
    scales = scales_of(64 // GROUP, 32, dtype=torch.float32)
    groups = integers(64 // GROUP, 64, seed=3)
    tensors = {
        "qweight": pack_words(values.t()).t(),
        "qzeros": pack_words(zeros),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    weight = loaded(checkpoint(tmp_path / "m", config, tensors), torch.float32)
    assert torch.equal(weight, ((values - zeros[groups] - 1) * scales[groups]).t())


def library_case(
    compressor: Any, args: dict[str, Any], form: str, asymmetric: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """Config and tensors as compressed-tensors writes them, and the weight that it reads back."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5)).bfloat16()
    width = {"group": SHAPE[1] // GROUP, "channel": 1}[args["strategy"]]
    if args["strategy"] == "group":
        args["group_size"] = GROUP
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    state = {
        "weight": weight,
        "weight_scale": scales_of(SHAPE[0], width, dtype=torch.bfloat16) * 4,
    }
    if asymmetric:
        state["weight_zero_point"] = (integers(16, SHAPE[0], width) - 8).to(torch.int8)
    compressed = compressor.compress(state, scheme)
    restored = compressor.decompress(dict(compressed), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
    }
    return config, compressed, restored


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_int4(tmp_path: Path, asymmetric: bool, strategy: str) -> None:
    args = {"num_bits": 4, "type": "int", "strategy": strategy, "symmetric": not asymmetric}
    config, tensors, expected = library_case(
        PackedQuantizationCompressor, args, "pack-quantized", asymmetric
    )
    weight = loaded(checkpoint(tmp_path / "m", config, tensors), torch.bfloat16)
    assert isinstance(weight, Int4Weight)
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize(
    ("compressor", "kind", "form", "expected_class"),
    [
        (IntQuantizationCompressor, "int", "int-quantized", Int8Weight),
        (FloatQuantizationCompressor, "float", "float-quantized", Fp8Weight),
    ],
)
def test_compressed_tensors_8_bits(
    tmp_path: Path, compressor: Any, kind: str, form: str, expected_class: type
) -> None:
    args = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    config, tensors, expected = library_case(compressor, args, form)
    weight = loaded(checkpoint(tmp_path / "m", config, tensors), torch.bfloat16)
    assert isinstance(weight, expected_class)
    assert torch.equal(weight.dequantize(), expected)


def test_compressed_tensors_int8_in_groups_is_dense(tmp_path: Path) -> None:
    args = {"num_bits": 8, "type": "int", "strategy": "group", "symmetric": True}
    config, tensors, expected = library_case(IntQuantizationCompressor, args, "int-quantized")
    weight = loaded(checkpoint(tmp_path / "m", config, tensors), torch.bfloat16)
    assert torch.equal(weight.bfloat16(), expected)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "bitsandbytes"}, "Supported: awq, gptq, compressed-tensors"),
        (AWQ | {"bits": 3}, "bits 3 is not read"),
        (AWQ | {"group_size": 0}, "group_size must be"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ([], "is not read"),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, config: Any, expected: str) -> None:
    folder = checkpoint(tmp_path / "m", config, {"weight": torch.zeros(SHAPE)})
    with pytest.raises(ConfigError, match=r"config\.json: quantization_config") as caught:
        load_model(folder, torch.float32)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("part", "tensor", "expected"),
    [
        ("qzeros", None, "comes without its qzeros"),
        ("qzeros", torch.zeros(3, 4, dtype=torch.int32), "must have shape [32, 4]"),
        ("scales", torch.zeros(4, 31), "must have shape [32, 4]"),
        ("qweight", torch.zeros(64, 4), "int32 matrix"),
        ("qweight", torch.zeros(63, 4, dtype=torch.int32), "has shape [32, 63]"),
        ("qweight", torch.zeros(64, dtype=torch.int32), "1 dimensions"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, part: str, tensor: torch.Tensor | None, expected: str
) -> None:
    tensors = {
        "qweight": torch.zeros(64, 4, dtype=torch.int32),
        "qzeros": torch.zeros(4, 4, dtype=torch.int32),
        "scales": torch.ones(4, 32),
    }
    tensors.pop(part)
    if tensor is not None:
        tensors[part] = tensor
    with pytest.raises(ConfigError) as caught:
        load_model(checkpoint(tmp_path / "m", AWQ, tensors), torch.float32)
    assert expected in str(caught.value)
    assert MODULE in str(caught.value)
