"""How much attention each block got: the same by both paths, and blind to company."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_context import MIXED, Context, num_threads
from paged_runs import make_cache, make_paged_sequence
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.model_runner import build_forward_batch
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.loader import load_model
from shoal.kernels.attention_mass import MASS_ONE
from shoal.kernels.native_library import NativeLibrary
from shoal.scheduler.outputs import ScheduledSequence

LENGTHS = [70, 200, 65, 1]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def native_mass(
    context: Context, native: NativeLibrary, *ranges: tuple[int, int, int]
) -> torch.Tensor:
    mass = context.mass_rows(*ranges)
    context.native(native, *ranges, block_mass=mass)
    return mass


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1)])
def test_native_is_close_to_the_reference(
    native: NativeLibrary, dtype: torch.dtype, heads: tuple[int, int], block_size: int
) -> None:
    context = Context(LENGTHS, dtype, heads, block_size=block_size)
    expected = context.mass_rows(*MIXED)
    context.reference(*MIXED, block_mass=expected)
    mass = native_mass(context, native, *MIXED)
    torch.testing.assert_close(mass / MASS_ONE, expected / MASS_ONE, rtol=1e-4, atol=1e-4)
    assert (mass.sum(-1) > 0).all()


@pytest.mark.parametrize("block_size", [5, 16])
def test_mass_is_of_squared_shares(native: NativeLibrary, block_size: int) -> None:
    """Where all keys weigh the same, a block's share is its part of the context."""
    context = Context([70], torch.float32, block_size=block_size)
    context.queries[0].zero_()
    mass = native_mass(context, native, (0, 60, 70))[0] / MASS_ONE
    lens = torch.arange(61, 71)
    starts = torch.arange(len(mass))[:, None] * block_size
    shares = (lens - starts).clamp(0, block_size) / lens
    num_heads = context.queries[0].shape[1]
    torch.testing.assert_close(mass.float(), num_heads * shares.square().sum(dim=1))


def test_asking_changes_no_answer(native: NativeLibrary, dtype: torch.dtype) -> None:
    context = Context(LENGTHS, dtype)
    asked = context.native(native, *MIXED, block_mass=context.mass_rows(*MIXED))
    assert torch.equal(asked, context.native(native, *MIXED))


def test_company_and_threads_change_no_bit(native: NativeLibrary, dtype: torch.dtype) -> None:
    context = Context(LENGTHS, dtype)
    alone = torch.cat([native_mass(context, native, part) for part in MIXED])
    assert torch.equal(native_mass(context, native, *MIXED), alone)
    backwards = native_mass(context, native, *reversed(MIXED))
    assert torch.equal(backwards.flip(0), alone)
    for count in (1, 3):
        with num_threads(count):
            assert torch.equal(native_mass(context, native, *MIXED), alone)


def test_chunks_add_up_to_the_whole(native: NativeLibrary, dtype: torch.dtype) -> None:
    context = Context([131], dtype, (9, 3))
    whole = native_mass(context, native, (0, 0, 131))
    for split in (1, 16, 50, 130):
        parts = [native_mass(context, native, part) for part in ((0, 0, split), (0, split, 131))]
        assert torch.equal(parts[0] + parts[1], whole)


class TestModel:
    """Over all layers, through the batch."""

    def masses(self, model: Any, *chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last chunk's logits and mass."""
        ids = [(7 * idx) % 90 for idx in range(sum(chunks))]
        sequence, kv = make_paged_sequence(ids, (11, 2, 40, 7, 63, 1, 33, 20)), make_cache(model)
        for size in chunks:
            item = ScheduledSequence(sequence, size)
            batch = build_forward_batch([item], kv.block_size, model.device)
            mass = torch.zeros(batch.groups[0].block_tables.shape, dtype=torch.int64)
            logits = model.forward(dataclasses.replace(batch, block_mass=mass), kv)
            sequence.num_computed_tokens += size
        return logits, mass

    def test_both_paths_agree(self, tmp_path: Path, native: NativeLibrary) -> None:
        folder = write_tiny_checkpoint(tmp_path / "tiny", num_key_value_heads=2)
        reference = load_model(folder, torch.float32).model
        config = reference.config
        _, expected = self.masses(reference, 20, 3, 1)
        _, mass = self.masses(
            NativeDecoder(load_model(folder, torch.float32).model, native), 20, 3, 1
        )
        torch.testing.assert_close(mass / MASS_ONE, expected / MASS_ONE, rtol=1e-3, atol=1e-4)
        assert 0 < float(mass.sum() / MASS_ONE) < config.num_layers * config.num_heads
        assert not mass[0, 6:].any()

    @pytest.mark.parametrize("on_native", [False, True])
    def test_attention_goes_by_cache_index_and_rotation_by_position(
        self, tmp_path: Path, native: NativeLibrary, on_native: bool
    ) -> None:
        """All positions moved by the same distance: rotations are relative, so nothing changes."""
        folder = write_tiny_checkpoint(tmp_path / "tiny", num_key_value_heads=2)
        model: Any = load_model(folder, torch.float32).model
        if on_native:
            model = NativeDecoder(model, native)
        logits, kv = {}, make_cache(model)
        for shift in (0, 300):
            sequence = make_paged_sequence(range(30), range(10, 18))
            batch = build_forward_batch(
                [ScheduledSequence(sequence, 30)], kv.block_size, model.device
            )
            moved = dataclasses.replace(batch, positions=batch.positions + shift)
            logits[shift] = model.forward(moved, kv)
            uneven = dataclasses.replace(batch, positions=batch.positions * 2)
            assert not torch.allclose(model.forward(uneven, kv), logits[0], atol=1e-3)
        torch.testing.assert_close(logits[300], logits[0], rtol=1e-3, atol=1e-3)
