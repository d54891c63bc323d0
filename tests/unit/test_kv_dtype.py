"""Keys and values in other types than the model's: what is kept, and that both paths agree."""

from pathlib import Path

import native_attention
import pytest
import torch
from attention_context import empty_layer_cache, normal
from builders import make_sequence
from paged_runs import make_cache, make_paged_sequence, run_step
from tiny_checkpoint import write_tiny_checkpoint
from tiny_runs import generate

from shoal.backend.engine_builder import choose_kv_dtype
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.kv_cache import PagedKVCache, bytes_per_block
from shoal.backend.kv_layout import KVLayout, LayerKV
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.loader import load_model
from shoal.kernels.kv_quantization import dequantize_heads, quantize_heads
from shoal.kernels.native_heads import AttentionHeads
from shoal.kernels.native_library import NativeLibrary
from shoal.kernels.rotary_embedding import rotary_angles, rotary_embedding
from shoal.scheduler.eviction import LruPolicy
from shoal.scheduler.sequence import Sequence

FP8 = torch.float8_e4m3fn
STORED = [torch.int8, FP8]
BLOCKS = (11, 2, 40, 7, 63, 1, 33, 20, 5, 18, 50, 9, 27)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=STORED, ids=["int8", "fp8"])
def stored(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestQuantization:
    def test_error_is_bounded_by_the_heads_own_magnitude(self, stored: torch.dtype) -> None:
        states = normal(50, 3, 64) * torch.logspace(-20, 20, 50)[:, None, None]
        values, scales = quantize_heads(states, stored)
        error = (dequantize_heads(values, scales, torch.float32) - states).abs()
        largest = states.abs().amax(dim=-1, keepdim=True)
        if stored == torch.int8:
            assert bool((error <= largest * (0.501 / 127)).all())
        else:  # 3 bits of mantissa; below 2^-6 of 448 in steps of 2^-9
            most = (states.abs() / 16).maximum(largest * 2**-10 / 448)
            assert bool((error <= most * 1.001).all())

    def test_zeros_stay_zeros_and_nan_is_not_lost(self, stored: torch.dtype) -> None:
        states = torch.zeros(2, 1, 8)
        states[1, 0, 3] = float("nan")
        out = dequantize_heads(*quantize_heads(states, stored), torch.float32)
        assert torch.equal(out[0], states[0])
        assert bool(out[1].isnan().all())

    def test_native_stores_the_same_bits(
        self, native: NativeLibrary, dtype: torch.dtype, stored: torch.dtype
    ) -> None:
        qkv, slots = normal(5, 10 * 48), torch.tensor([3, 0, 18, 7, 9])
        qkv[2, -48:] = 0
        qkv[3, -7] = float("nan")
        positions = torch.tensor([0, 1, 77, 4095, 12])
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, 48, 2) / 48))
        cache = empty_layer_cache((5, 4, 2, 48), stored)
        heads = AttentionHeads(6, 2, 48, 1.0)
        native.rotate_and_write(qkv, positions, inv_freq, slots, cache, heads, dtype)
        assert cache.key_scales is not None
        assert cache.value_scales is not None
        by_head = qkv.view(5, -1, 48)
        values, scales = quantize_heads(by_head[:, -2:], stored)
        kept = cache.value_scales.flatten(0, 1)[slots]
        assert torch.equal(kept.nan_to_num(), scales.nan_to_num())
        finite = ~scales.isnan()
        kept = cache.values.view(torch.int8).flatten(0, 1)[slots]
        assert torch.equal(kept[finite], values.view(torch.int8)[finite])

        rotated = rotary_embedding(by_head, rotary_angles(positions, inv_freq, torch.float32))
        values, scales = quantize_heads(rotated[:, 6:8], stored)
        kept = dequantize_heads(
            cache.keys.view(torch.int8).flatten(0, 1)[slots].view(stored),
            cache.key_scales.flatten(0, 1)[slots],
            torch.float32,
        )
        expected = dequantize_heads(values, scales, torch.float32)
        quantum = scales[..., None] * (1.01 if stored == torch.int8 else 32.01)
        assert bool(((kept - expected).abs() <= quantum).all())
        assert float((kept != expected).float().mean()) < 0.1
        assert torch.equal(cache.key_scales.isnan().flatten(0, 1).nonzero()[:, 0].unique(), _others)

    def test_every_fp8_number_rounds_as_in_torch(self, native: NativeLibrary) -> None:
        """Heads whose scale is 1, of all bfloat16 magnitudes that fp8 holds, between them too."""
        numbers = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
        numbers = numbers[numbers <= 448]
        numbers = torch.cat([numbers, -numbers])
        rows = torch.full((-(-len(numbers) // 15), 16), 448.0)
        rows[:, :15] = torch.nn.functional.pad(numbers, (0, -len(numbers) % 15)).view(-1, 15)
        qkv = torch.cat([torch.zeros(len(rows), 32), rows], dim=1)
        cache = empty_layer_cache((len(rows), 1, 1, 16), FP8)
        slots = torch.arange(len(rows))
        native.rotate_and_write(
            qkv, slots, torch.zeros(0), slots, cache, AttentionHeads(1, 1, 16, 1.0), torch.float32
        )
        kept = cache.values.view(torch.int8).flatten(0, 2)
        assert torch.equal(kept, rows.to(FP8).view(torch.int8))


_others = torch.tensor([idx for idx in range(20) if idx not in (3, 0, 18, 7, 9)])


class TestNativeAttention:
    @pytest.mark.parametrize("head_dim", [24, 64, 80, 256])
    @pytest.mark.parametrize("window", [None, 40])
    def test_close_to_reference(
        self,
        native: NativeLibrary,
        dtype: torch.dtype,
        stored: torch.dtype,
        head_dim: int,
        window: int | None,
    ) -> None:
        check = native_attention.check_close_to_reference
        check(native, dtype, window, None, head_dim, (9, 3), stored)

    def test_bfloat16_under_a_float32_model(self, native: NativeLibrary) -> None:
        check = native_attention.check_close_to_reference
        check(native, torch.float32, None, 5.0, 64, (9, 3), torch.bfloat16)

    def test_same_bits_by_every_way(
        self, native: NativeLibrary, dtype: torch.dtype, stored: torch.dtype
    ) -> None:
        native_attention.check_decodes_equal_the_prefill(native, dtype, None, stored)
        native_attention.check_company_changes_no_bit(native, dtype, 40, stored)
        native_attention.check_split_tasks_change_no_bit(native, dtype, None, stored)

    def test_float32_keys_under_a_bfloat16_model_are_refused(self, native: NativeLibrary) -> None:
        with pytest.raises(ValueError, match="cannot use keys"):
            native_attention.check_company_changes_no_bit(
                native, torch.bfloat16, None, torch.float32
            )


class TestModel:
    def test_both_paths_agree_and_chunks_change_no_bit(
        self, tmp_path: Path, native: NativeLibrary, dtype: torch.dtype, stored: torch.dtype
    ) -> None:
        folder = write_tiny_checkpoint(tmp_path / "tiny", num_key_value_heads=2)
        ids = [(7 * idx) % 90 for idx in range(45)]

        def logits(model, *chunks, stored=stored):
            sequence, kv = make_paged_sequence(ids, BLOCKS), make_cache(model, stored=stored)
            rows = [run_step(model, kv, (sequence, size), all_rows=True) for size in chunks]
            return torch.cat(rows)

        reference = load_model(folder, dtype).model
        model = NativeDecoder(load_model(folder, dtype).model, native)
        whole = logits(model, 45)
        assert torch.equal(logits(model, 20, 1, 1, 23), whole)
        if dtype == torch.float32:
            exact = logits(reference, 45, stored=torch.float32)
            error = float((whole - exact).abs().mean())
            assert 0 < error < (0.03 if stored == torch.int8 else 0.12) * float(exact.std())
            # A head may be rounded otherwise in its last bit.
            assert float((whole - logits(reference, 45)).abs().mean()) < error / 20


class TestTexts:
    """Through the scheduler: what is stored moves and is found again with its scales."""

    SAMPLING = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}

    def sequences(self) -> list[Sequence]:
        return [
            make_sequence(idx, 6 + 3 * idx, prompt_seed=7 * idx, **self.SAMPLING)
            for idx in range(12)
        ]

    def test_host_tier_and_prefix_cache(
        self, tmp_path: Path, native: NativeLibrary, stored: torch.dtype
    ) -> None:
        loaded = load_model(write_tiny_checkpoint(tmp_path / "tiny"), torch.float32)
        model = NativeDecoder(loaded.model, native)
        expected = generate(loaded, self.sequences(), model=model, stored=stored, num_blocks=400)
        assert not expected.failed
        assert len({tuple(text) for text in expected.texts.values()}) > 6
        squeezed = generate(
            loaded,
            self.sequences(),
            model=model,
            stored=stored,
            host_blocks=100,
            return_costs=(1e-6, 1e-3),
            prefix_eviction=LruPolicy(),
            num_blocks=18,
            max_model_len=70,
            max_num_seqs=6,
        )
        assert squeezed.scheduler.num_preemptions > 5
        assert squeezed.scheduler.kv.host.prefixes.num_restored > 10
        assert squeezed.texts == expected.texts

    def test_forks(self, tmp_path: Path, native: NativeLibrary, stored: torch.dtype) -> None:
        loaded = load_model(write_tiny_checkpoint(tmp_path / "tiny"), torch.float32)
        model = NativeDecoder(loaded.model, native)

        def choices() -> list[Sequence]:
            return [
                make_sequence(idx, 30, prompt_seed=0, seed=idx, **self.SAMPLING) for idx in range(3)
            ]

        options = {"model": model, "stored": stored, "num_blocks": 64}
        alone: dict[int, list[int]] = {}
        for sequence in choices():
            alone |= generate(loaded, [sequence], **options).texts
        assert generate(loaded, choices(), forks_of=0, **options).texts == alone


class TestMemory:
    LAYOUT = KVLayout.of([LayerKV(2, 32), LayerKV(1, 64, window=8), LayerKV(2, 32, shared_with=0)])

    @pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, *STORED])
    def test_bytes_are_what_is_taken(self, kept: torch.dtype) -> None:
        kv = PagedKVCache(self.LAYOUT, [7, 5], 4, kept)
        sizes = bytes_per_block(self.LAYOUT, 4, kept)
        assert kv.num_bytes == 7 * sizes[0] + 5 * sizes[1]
        parts = [part for group in range(2) for part in kv.block_parts(group)]
        assert sum(part.nbytes for part in parts) == kv.num_bytes

    def test_eight_bits_hold_nearly_twice(self, stored: torch.dtype) -> None:
        layout = KVLayout.uniform(2, 3, 64)
        (wide,) = bytes_per_block(layout, 16, torch.bfloat16)
        (narrow,) = bytes_per_block(layout, 16, stored)
        assert wide / narrow > 1.88

    def test_copying_the_parts_copies_the_block(
        self, tmp_path: Path, native: NativeLibrary, stored: torch.dtype
    ) -> None:
        """A decode over copied blocks gives the bits of one over the blocks themselves."""
        folder = write_tiny_checkpoint(tmp_path / "tiny", num_key_value_heads=2)
        model = NativeDecoder(load_model(folder, torch.float32).model, native)
        sequence = make_paged_sequence(range(12), (5, 9, 2))
        kv = make_cache(model, stored=stored)
        run_step(model, kv, (sequence, 11))
        copied = make_paged_sequence(range(12), (30, 31, 32))
        copied.num_computed_tokens = 11
        for part in kv.block_parts(0):
            part[:, [30, 31, 32]] = part[:, [5, 9, 2]]
        assert torch.equal(run_step(model, kv, (copied, 1)), run_step(model, kv, (sequence, 1)))


class TestSetting:
    def test_names_are_checked(self) -> None:
        with pytest.raises(ConfigError, match="kv_dtype must be one of auto, float32"):
            EngineConfig(weights="w", kv_dtype="fp16")

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("auto", torch.bfloat16), ("fp8", FP8), ("int8", torch.int8)],
    )
    def test_choice(self, name: str, expected: torch.dtype) -> None:
        assert choose_kv_dtype(name, torch.bfloat16) == expected

    def test_wider_than_the_model_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="needs a model in float32"):
            choose_kv_dtype("float32", torch.bfloat16)
