"""The native products with packed weights: close to the reference, the same bits in any company."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_runs import make_cache, make_paged_sequence, run_step
from tiny_checkpoint import write_tiny_checkpoint
from torch.nn import functional

from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.quantization.schemes import SCHEMES, quantize_int4
from shoal.backend.weights.loader import load_model
from shoal.kernels.linear import linear
from shoal.kernels.native_library import (
    Epilogue,
    NativeLibrary,
    PackedFormat,
    load_native,
    pointer,
)
from shoal.kernels.native_plan import PlanBuilder, StepArguments
from shoal.kernels.quantized_panels import pack_panels
from shoal.kernels.quantized_weights import QuantizedWeight

FORMATS = ("int8", "int4", "fp8")
BLOCKS = (11, 2, 40, 7, 63, 1, 33, 20, 5, 18, 50, 9, 27)
FORMAT_OF = {
    "int8": PackedFormat.INT8,
    "int4": PackedFormat.INT4_SHORT,
    "fp8": PackedFormat.FP8,
}
SIZES = [(32, 64), (1, 1), (33, 7), (95, 65), (577, 130), (64, 576)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(states: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor) -> torch.Tensor:
    """The product in float64 of what the format holds."""
    dense = replace(weight, dtype=torch.float64).dequantize()  # type: ignore[type-var]
    return functional.linear(states.double(), dense, bias.double())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, 13, 50, 90])
def test_states_in_8_bits_are_close_to_the_reference(
    native: NativeLibrary, dtype: torch.dtype, kind: str, num_rows: int, n: int, k: int
) -> None:
    weight, bias = SCHEMES[kind](normal(n, k), dtype), normal(n, seed=2, dtype=dtype)
    states = normal(num_rows, k, seed=3, dtype=dtype)
    packed = native.pack_linear(weight, bias)
    assert packed.format is FORMAT_OF[kind]
    out = native.linear(states, packed)
    expected = linear(states.float(), weight, bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * k**0.5)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("num_rows", [1, 13, 50])
def test_fp8_is_close_to_exact(
    native: NativeLibrary, dtype: torch.dtype, num_rows: int, n: int, k: int
) -> None:
    weight, bias = SCHEMES["fp8"](normal(n, k), dtype), normal(n, seed=2, dtype=dtype)
    states = normal(num_rows, k, seed=3, dtype=dtype)
    packed = native.pack_linear(weight, bias)
    assert packed.format is PackedFormat.FP8
    out = native.linear(states, packed)
    torch.testing.assert_close(
        out.double(), exact(states, weight, bias), rtol=1e-5, atol=1e-5 * k**0.5
    )


@pytest.mark.parametrize("group_size", [8, 24, 32, 64, 128, 192, 1000])
def test_int4_groups_of_any_size(
    native: NativeLibrary, dtype: torch.dtype, group_size: int
) -> None:
    weight = quantize_int4(normal(40, 300), dtype, group_size)
    states = normal(5, 300, seed=1, dtype=dtype)
    packed = native.pack_linear(weight)
    assert packed.format is PackedFormat.INT4_SHORT
    expected = linear(states.float(), weight, None)
    torch.testing.assert_close(native.linear(states, packed), expected, rtol=1e-5, atol=2e-4)
    # A scale that takes more than bfloat16 has: every eighth bit more, or the zero point 16.
    finer = replace(weight, scales=weight.scales.float() * (1 + 2**-10))
    assert finer.zeros is not None
    larger = replace(weight, zeros=torch.where(finer.zeros == 7, 16, finer.zeros))
    for other in (finer, larger):
        packed = native.pack_linear(other)
        assert packed.format is PackedFormat.INT4
        expected = linear(states.float(), other, None)
        torch.testing.assert_close(native.linear(states, packed), expected, rtol=1e-5, atol=4e-4)
    expected = linear(states.float(), weight, None)
    off = (expected - exact(states, weight, torch.zeros(40))).norm() / expected.norm()
    assert off < 0.02  # what 8 bits of the states cost


def test_int4_columns_in_another_order(native: NativeLibrary, dtype: torch.dtype) -> None:
    plain = quantize_int4(normal(40, 256), dtype)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    weight = replace(plain, columns=order)
    states = normal(5, 256, seed=1, dtype=dtype)
    out = native.linear(states, native.pack_linear(weight))
    assert torch.equal(out, native.linear(states[:, order], native.pack_linear(plain)))
    expected = linear(states.float(), weight, None)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("largest", [15, 128, 255])
def test_int4_zero_points_of_any_size(
    native: NativeLibrary, dtype: torch.dtype, largest: int
) -> None:
    plain = quantize_int4(normal(40, 256), dtype)
    assert plain.zeros is not None
    weight = replace(plain, zeros=torch.where(plain.zeros == 7, largest, plain.zeros))
    packed, states = native.pack_linear(weight), normal(90, 256, seed=1, dtype=dtype)
    out = native.linear(states, packed)
    assert torch.equal(out, torch.cat([native.linear(row[None], packed) for row in states]))
    expected = linear(states.float(), weight, None)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 * max(largest, 40))


def test_int4_without_zero_points(native: NativeLibrary, dtype: torch.dtype) -> None:
    weight = replace(quantize_int4(normal(40, 256), dtype), zeros=None)
    states = normal(5, 256, seed=1, dtype=dtype)
    expected = linear(states.float(), weight, None)
    out = native.linear(states, native.pack_linear(weight))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_states_of_all_magnitudes(native: NativeLibrary, kind: str) -> None:
    weight = SCHEMES[kind](normal(40, 64), torch.float32)
    magnitudes = torch.tensor([0.0, 1e-45, 1e-38, 9e-31, 2e-30, 1e-20, 1e20, 1e30])
    states = magnitudes[:, None] * normal(1, 64, seed=1)
    out = native.linear(states, native.pack_linear(weight))
    expected = linear(states, weight, None)
    relative = (out - expected) / torch.where(magnitudes > 0, magnitudes, 1.0)[:, None]
    assert float(relative.abs().max()) < 1e-4
    assert bool(out.isfinite().all())


def test_every_fp8_value_is_read_as_it_is(native: NativeLibrary, dtype: torch.dtype) -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    weight = SCHEMES["fp8"](normal(len(codes), 1), dtype)
    weight = replace(
        weight,  # type: ignore[type-var]
        values=codes.view(torch.float8_e4m3fn)[:, None],
        scales=torch.ones(len(codes)),
    )
    out = native.linear(torch.ones(1, 1, dtype=dtype), native.pack_linear(weight))
    assert torch.equal(out[0], codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", FORMATS)
def test_packing_in_slices_gives_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str
) -> None:
    weight = SCHEMES[kind](normal(150, 70), dtype)
    whole = pack_panels(weight)
    monkeypatch.setattr("shoal.kernels.quantized_panels._SLICE_ELEMENTS", 70 * 64)
    in_slices = pack_panels(weight)
    assert whole is not None
    assert in_slices is not None
    assert (whole.format, whole.group_size) == (in_slices.format, in_slices.group_size)
    assert torch.equal(whole.values, in_slices.values)


def test_what_the_kernels_do_not_know_is_multiplied_dense(native: NativeLibrary) -> None:
    uneven = quantize_int4(normal(8, 30), torch.float32, group_size=10)
    fp8 = SCHEMES["fp8"](normal(3, 2), torch.float32)
    fp8.values.view(torch.uint8)[0, 0] = 0x7F
    for weight in (uneven, fp8):
        assert pack_panels(weight) is None
        assert native.pack_linear(weight).format is PackedFormat.DENSE


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("k", [333, 192])
def test_a_row_alone_equals_the_row_among_others(
    native: NativeLibrary, dtype: torch.dtype, kind: str, k: int
) -> None:
    packed = native.pack_linear(SCHEMES[kind](normal(95, k), dtype))
    states = normal(200, k, seed=1, dtype=dtype)
    alone = torch.cat([native.linear(row[None], packed) for row in states])
    for count in (1, 2, 3, 7, 12, 13, 25, 64, 130, 193):
        for start in (0, 200 - count):
            rows = slice(start, start + count)
            assert torch.equal(native.linear(states[rows], packed), alone[rows])


@pytest.mark.parametrize("kind", FORMATS)
def test_nan_and_infinity_stay_in_their_row(
    native: NativeLibrary, dtype: torch.dtype, kind: str
) -> None:
    packed = native.pack_linear(SCHEMES[kind](normal(64, 32), dtype))
    states = normal(13, 32, seed=1, dtype=dtype)
    clean = native.linear(states, packed)
    states[4, 3] = float("nan")
    states[5, 3] = float("inf")
    out = native.linear(states, packed)
    others = [row for row in range(13) if row not in (4, 5)]
    assert not bool(out[[4, 5]].isfinite().any())
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 5, 9])
def test_groups_side_by_side_are_quantised_as_each_alone(
    native: NativeLibrary, kind: str, num_groups: int
) -> None:
    """bfloat16's whole groups go side by side; float32's and the last columns one after another."""
    rows, k = 40, 64 * num_groups + 8
    exponents = torch.randint(-130, 60, (rows, k // 8), generator=torch.Generator().manual_seed(1))
    scales = torch.exp2(exponents.float()).repeat_interleave(8, dim=1)
    states = (normal(rows, k) * torch.where(scales < 1e-38, 0.0, scales)).bfloat16()
    states[:20] = normal(20, k, seed=2)  # all groups alike
    states[3, k // 2], states[5, 0], states[7, 63] = float("nan"), float("inf"), -float("inf")
    weight = SCHEMES[kind](normal(40, k), torch.bfloat16)
    out = native.linear(states, native.pack_linear(weight))
    wide = replace(weight, dtype=torch.float32, scales=weight.scales.float())
    expected = native.linear(states.float(), native.pack_linear(wide))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("inner", [16, 23])
def test_gated(native: NativeLibrary, dtype: torch.dtype, kind: str, inner: int) -> None:
    gate, up = (SCHEMES[kind](normal(inner, 48, seed=seed), dtype) for seed in (0, 1))
    states = normal(19, 48, seed=2, dtype=dtype)
    packed = native.pack_gated(gate, up)
    assert packed.format is FORMAT_OF[kind]
    out = native.linear(states, packed, Epilogue.SILU_MUL, out_features=inner)
    parts = [native.linear(states, native.pack_linear(weight)) for weight in (gate, up)]
    expected = functional.silu(parts[0]) * parts[1]
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("inner", [256, 200])
def test_rows_prepared_by_the_product_before(
    native: NativeLibrary, dtype: torch.dtype, kind: str, inner: int
) -> None:
    """What a gated product gives is prepared group by group where groups are whole; the next
    product is then that of the same rows prepared each by itself."""
    size = 96
    gate, up = (SCHEMES[kind](normal(inner, size, seed=i), dtype) for i in (1, 2))
    gate_up = native.pack_gated(gate, up)
    down = native.pack_linear(SCHEMES[kind](normal(size, inner, seed=3), dtype))
    builder = PlanBuilder(native, dtype)
    states, gated, out = builder.buffer(size), builder.buffer(inner), builder.buffer(size)
    sums = builder.buffer(size, torch.float32)
    builder.take_states(states)
    builder.linear(states, gate_up, gated, Epilogue.SILU_MUL)
    builder.linear(gated, down, sums)
    builder.round(sums, out)
    builder.keep_states(out)
    plan = builder.build()
    for rows in (1, 5, 90, 200):
        kept = normal(rows, size, seed=rows).to(dtype).float()
        between = native.linear(kept.to(dtype), gate_up, Epilogue.SILU_MUL, out_features=inner)
        expected = native.linear(between, down).to(dtype).float()
        plan.run(
            StepArguments(
                num_tokens=rows,
                num_samples=rows,
                num_threads=2,
                hidden_states=pointer(kept, torch.float32),
            )
        )
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model(
    tmp_path: Path, native: NativeLibrary, dtype: torch.dtype, kind: str, tied: bool
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", tie_word_embeddings=tied)
    ids = list(range(3, 40))

    def logits(model: object, *sizes: int) -> torch.Tensor:
        sequence, kv = make_paged_sequence(ids, BLOCKS), make_cache(model)
        return torch.cat([run_step(model, kv, (sequence, size), all_rows=True) for size in sizes])

    reference = logits(load_model(folder, torch.float32, quantization=kind).model, 37)
    model = NativeDecoder(load_model(folder, dtype, quantization=kind).model, native)
    whole = logits(model, 37)
    # Weights of random size make much of little: a state that falls to the other side of a
    # rounding, and the same weights quantised from bfloat16.
    spread = 0.5 if dtype == torch.bfloat16 or kind == "int8" else 2e-3
    assert (whole - reference).abs().mean() <= spread * reference.abs().mean()
    assert torch.equal(logits(model, 20, *[1] * 17), whole)
    # Nine at once: attention's tasks are then of whole rows.
    tables = [list(range(1 + 6 * i, 7 + 6 * i)) for i in range(9)]
    sequences, kv = [make_paged_sequence(ids[:21], table) for table in tables], make_cache(model)
    run_step(model, kv, *((sequence, 20) for sequence in sequences))
    together = run_step(model, kv, *((sequence, 1) for sequence in sequences))
    assert torch.equal(together, whole[20].expand(9, -1))


@pytest.mark.parametrize("flags", ["-mavx2 -mfma", "-march=x86-64"], ids=["avx2", "portable"])
def test_other_instructions_give_the_same(
    tmp_path: Path, native: NativeLibrary, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    if "AVX" not in native.instructions:
        pytest.skip("built for x86-64 alone")
    monkeypatch.setattr("shoal.kernels.native_build._machine_flag", lambda _: tuple(flags.split()))
    other = load_native(tmp_path)
    assert other.instructions != native.instructions or not flags
    for dtype in (torch.float32, torch.bfloat16):
        states = normal(14, 140, seed=1, dtype=dtype)
        for kind in FORMATS:
            weight = SCHEMES[kind](normal(40, 140), dtype)
            ours, theirs = (
                library.linear(states, library.pack_linear(weight)) for library in (native, other)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
