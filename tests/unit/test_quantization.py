"""Packed weights: what they hold, what they compute, and what quantising costs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import TINY_CONFIG, write_tiny_checkpoint
from torch.nn import functional

from shoal.backend.models.decoder import Decoder
from shoal.backend.models.registry import config_from_hf
from shoal.backend.quantization.plan import memory_ratio, plan_formats
from shoal.backend.quantization.schemes import SCHEMES, quantize_int4
from shoal.backend.weights.loader import load_model
from shoal.kernels.embedding import embedding
from shoal.kernels.linear import linear
from shoal.kernels.quantized_weights import (
    Int4Weight,
    QuantizedWeight,
    int8_product,
    join,
    pack_int4,
    quantize_tokens,
    unpack_int4,
)

# The largest error of a weight, in parts of its row's (int4: its group's) largest magnitude.
STEP = {"int8": 0.5 / 127, "fp8": 2**-4, "int4": 0.15, "int4_fine": 0.15}
FORMATS = ("int8", "int4", "fp8")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 130), (33, 576)])
def test_a_quantised_weight_is_close(kind: str, n: int, k: int) -> None:
    weight = normal(n, k)
    packed = SCHEMES[kind](weight, torch.float32)
    assert packed.shape == (n, k)
    error = (packed.dequantize() - weight).abs()
    assert bool((error <= 1.01 * STEP[kind] * weight.abs().amax(1, keepdim=True)).all())


@pytest.mark.parametrize("kind", FORMATS)
def test_slices_are_quantised_as_the_whole(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    weight = normal(37, 130)
    whole = SCHEMES[kind](weight, torch.float32)
    monkeypatch.setattr("shoal.backend.quantization.schemes._CHUNK_ELEMENTS", 1000)
    in_slices = SCHEMES[kind](weight, torch.float32)
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), in_slices.tensors()[name].view(torch.uint8))


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_weight_of_zeros_stays_zero(kind: str) -> None:
    packed = SCHEMES[kind](torch.zeros(3, 200), torch.bfloat16)
    assert not bool(packed.dequantize().any())
    assert not bool(linear(normal(2, 200, dtype=torch.bfloat16), packed).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_multiplies_as_its_dense_weight(dtype: torch.dtype) -> None:
    packed = SCHEMES["fp8"](normal(40, 300), dtype)
    states, bias = normal(7, 300, seed=1, dtype=dtype), normal(40, seed=2, dtype=dtype)
    assert torch.equal(
        linear(states, packed, bias), functional.linear(states, packed.dequantize(), bias)
    )


@pytest.mark.parametrize(("kind", "group"), [("int8", 32), ("int4", 64)])
def test_whole_numbers_are_multiplied(kind: str, group: int) -> None:
    packed = SCHEMES[kind](normal(40, 300), torch.float32)
    states = normal(7, 300, seed=1)
    values, scales = quantize_tokens(states, group)
    wide = values.double() * scales.repeat_interleave(group, dim=1)[:, :300]
    exact = wide @ replace(packed, dtype=torch.float64).dequantize().t()  # type: ignore[type-var]
    torch.testing.assert_close(linear(states, packed).double(), exact, rtol=1e-5, atol=1e-5)
    loss = linear(states, packed) - functional.linear(states, packed.dequantize())
    assert bool((loss.abs() <= 0.03 * states.norm(dim=1, keepdim=True)).all())


def test_state_scales_are_the_least_powers_of_two_that_reach() -> None:
    highest = torch.tensor([127.0, 127.00001, 126.9, 63.5, 63.6, 1.0, 2.0**109, 2.0**110, 1e-31])
    values, scales = quantize_tokens(highest[:, None], 1)
    expected = [1.0, 2.0, 1.0, 0.5, 1.0, 2.0**-6, 2.0**103]
    assert scales[:7, 0].tolist() == expected
    assert values[:7, 0].tolist() == [127, 64, 127, 127, 64, 64, 64]
    assert bool(scales[7].isnan())
    assert values[7:, 0].tolist() == [0, 0]


def test_int8_product_is_exact_at_its_largest() -> None:
    states = torch.full((2, 64), -127, dtype=torch.int8)
    states[1, 0] = -126
    expected = [[64 * 127 * 128], [64 * 127 * 128 - 128]]
    assert int8_product(states, torch.full((1, 64), -128, dtype=torch.int8)).tolist() == expected


def test_quantised_tokens_do_not_depend_on_each_other_and_keep_nan_apart() -> None:
    states = normal(4, 64)
    states[1, 3], states[2, 3] = torch.nan, torch.inf
    packed = SCHEMES["int8"](normal(8, 64), torch.float32)
    out = linear(states, packed)
    assert bool(out[1:3].isnan().all())
    assert torch.equal(out[::3], linear(states[::3], packed))
    assert bool(out[::3].isfinite().all())


def test_an_outlier_costs_only_its_group_precision() -> None:
    states = normal(1, 128)
    states[0, 3] = 1e6
    values, scales = quantize_tokens(states)
    assert not bool(values[0, 4:64].any())
    assert (values[0, 64:] * scales[0, 1] - states[0, 64:]).abs().max() < 0.02


def test_int4_values_round_trip() -> None:
    values = torch.randint(0, 16, (3, 77), dtype=torch.uint8)
    packed = pack_int4(values)
    assert packed.shape == (3, 39)
    assert torch.equal(unpack_int4(packed, 77), values)


def test_int4_uses_each_groups_own_range() -> None:
    weight = torch.cat([normal(4, 128), 100 * normal(4, 128, seed=1), 5 + normal(4, 44)], dim=1)
    packed = quantize_int4(weight, torch.float32)
    error = (packed.dequantize() - weight).abs()
    for start in (0, 128, 256):
        group = weight[:, start : start + 128]
        span = group.amax(1).clamp(min=0) - group.amin(1).clamp(max=0)
        assert bool((error[:, start : start + 128].amax(1) <= 0.2 * span).all())
    assert error[:, :128].max() < 1 < error[:, 128:256].max()


def test_int4_keeps_the_largest_weights() -> None:
    weight = normal(6, 256)
    weight[:, ::128] = 20.0
    loss = (quantize_int4(weight, torch.float32).dequantize() - weight).abs()
    assert bool((loss[:, ::128] <= 0.55 * 24 / 15).all())  # half a step, the range being 24 or so


def test_int4_columns_say_where_features_belong() -> None:
    plain = quantize_int4(normal(6, 256), torch.float32)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    moved = Int4Weight(
        plain.values, plain.scales, plain.zeros, 128, 256, torch.float32, columns=order
    )
    assert torch.equal(moved.dequantize()[:, order], plain.dequantize())


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_taken_and_joined_packed(kind: str) -> None:
    packed = SCHEMES[kind](normal(10, 130), torch.bfloat16)
    ids = torch.tensor([[3, 9], [0, 3]])
    assert torch.equal(embedding(ids, packed), functional.embedding(ids, packed.dequantize()))
    whole = join([packed.take(torch.arange(4)), packed.take(torch.arange(4, 10))])
    assert isinstance(whole, QuantizedWeight)
    assert torch.equal(whole.dequantize(), packed.dequantize())


def test_unlike_weights_join_dense() -> None:
    left, right = SCHEMES["int8"](normal(2, 8), torch.float32), normal(3, 8)
    joined = join([left, right])
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined, torch.cat([left.dequantize(), right]))


def llama_shapes(vocab: int, hidden: int, inner: int, layers: int) -> dict[str, tuple[int, ...]]:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner}
    config = config_from_hf(
        TINY_CONFIG
        | sizes
        | {"num_hidden_layers": layers, "num_attention_heads": 9, "num_key_value_heads": 3}
    )
    return Decoder.weight_shapes(config)


def test_int4_keeps_the_ends_in_8_bits_where_they_fit_the_budget() -> None:
    small_ends = llama_shapes(49152, 576, 1536, 30)
    formats = plan_formats(small_ends, "int4")
    assert formats["model.embed_tokens.weight"] == "int8"
    layer = "model.layers.0."
    assert {kind for name, kind in formats.items() if layer in name} == {"int4_fine"}
    assert memory_ratio(small_ends, formats) <= 0.32
    formats = plan_formats(llama_shapes(49152, 576, 1536, 28), "int4")
    assert formats[layer + "self_attn.v_proj.weight"] == "int4_fine"
    gate, up = (formats[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert gate == up == "int4"
    large_ends = llama_shapes(262144, 576, 1536, 12)
    formats = plan_formats(large_ends, "int4")
    assert formats["model.embed_tokens.weight"] == "int4"
    assert memory_ratio(large_ends, formats) <= 0.32


@pytest.mark.parametrize("quantization", ["none", *FORMATS])
def test_norms_stay_dense(quantization: str) -> None:
    formats = plan_formats(llama_shapes(128, 72, 64, 2), quantization)
    assert not any("norm" in name for name in formats)
    assert len(formats) == (0 if quantization == "none" else 15)


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_model_quantised_at_load_keeps_packed_weights(tmp_path: Path, quantization: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    loaded = load_model(folder, torch.float32, quantization=quantization)
    layer = next(loaded.model.take_layers())
    for part in (layer.attention.q_proj, layer.attention.o_proj, layer.mlp.gate, layer.mlp.down):
        assert type(part.weight) is type(SCHEMES[quantization](normal(2, 4), torch.float32))
    assert isinstance(loaded.model.take_ends().embed_tokens, QuantizedWeight)
