"""Keys that lie in the cache as panels: the bits of rows, and the reference knows them too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_context import MIXED, TOLERANCE, Context, normal, num_threads
from native_checks import random_ids
from paged_runs import fill_cache, make_paged_sequence, run_step

from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_layout import KVLayout, LayerKV
from shoal.backend.models.native import make_native
from shoal.backend.weights.loader import load_model
from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.layer_cache import LayerCache, as_panels, fit_panels
from shoal.kernels.native_heads import AttentionHeads
from shoal.kernels.native_library import NativeLibrary
from shoal.load.tiny_models import TINY_MODELS, write_tiny_model
from shoal.scheduler.transfers import DeviceCopy

BF16 = torch.bfloat16
LENGTHS = [70, 200, 65, 1, 1100, 64, 63, 17]
DECODES = tuple((idx, length - 1, length) for idx, length in enumerate(LENGTHS))
RANGES = (*MIXED, *DECODES, (4, 700, 703), (4, 511, 513), (4, 0, 16), (6, 15, 63))


def both(**options: Any) -> tuple[Context, Context]:
    """The same sequences, with keys in rows and in panels."""
    return Context(LENGTHS, BF16, **options), Context(LENGTHS, BF16, key_panels=True, **options)


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((4, 4), 64), ((9, 3), 64), ((8, 1), 128), ((16, 2), 256), ((6, 2), 80), ((20, 4), 34)],
)
def test_the_bits_of_rows(
    native: NativeLibrary, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    rows, panels = both(heads=heads, head_dim=head_dim, block_size=block_size)
    assert panels.cache.keys_in_panels
    for count in (1, 2):
        with num_threads(count):
            expected = rows.native(native, *RANGES)
            assert torch.equal(panels.native(native, *RANGES), expected)
    torch.testing.assert_close(expected.float(), panels.reference(*RANGES), **TOLERANCE[BF16])
    assert torch.equal(panels.reference(*RANGES), rows.reference(*RANGES))


@pytest.mark.parametrize("window", [1, 15, 40, 64, 90, 600])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_block_mass(native: NativeLibrary, window: int, softcap: float | None) -> None:
    """Blocks before every window belong to nobody, and are NaN."""
    rows, panels = both(heads=(9, 3), head_dim=64, window=window, softcap=softcap)
    expected = rows.native(native, *RANGES)
    assert torch.equal(panels.native(native, *RANGES), expected)
    assert bool(expected.isfinite().all())
    masses = [context.mass_rows(*RANGES) for context in (rows, panels, panels)]
    rows.native(native, *RANGES, block_mass=masses[0])
    panels.native(native, *RANGES, block_mass=masses[1])
    panels.reference(*RANGES, block_mass=masses[2])
    assert torch.equal(masses[0], masses[1])
    assert masses[2].any()


@pytest.mark.parametrize("head_dim", [34, 64, 256])
def test_written_as_by_the_reference(native: NativeLibrary, head_dim: int) -> None:
    heads = AttentionHeads(6, 2, head_dim, 1.0)
    slots = torch.tensor([3, 0, 49, 15, 16, 95])
    caches = []
    for in_panels in (False, True):
        keys, values = (torch.zeros(6, 16, 2, head_dim, dtype=BF16) for _ in range(2))
        cache = LayerCache(as_panels(keys) if in_panels else keys, values)
        rows, positions = normal(6, 10 * head_dim), torch.arange(6) * 100
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, head_dim, 2) / head_dim))
        native.rotate_and_write(rows, positions, inv_freq, slots, cache, heads, BF16)
        caches.append(cache)
    rows_cache, panels_cache = caches
    everywhere = torch.arange(96)
    assert torch.equal(panels_cache.read_keys(everywhere), rows_cache.read_keys(everywhere))
    assert torch.equal(panels_cache.values, rows_cache.values)
    untouched = [slot for slot in range(96) if slot not in slots.tolist()]
    assert not panels_cache.read_keys(torch.tensor(untouched)).any()

    again = LayerCache(torch.zeros_like(panels_cache.keys), torch.zeros_like(rows_cache.values))
    kv_cache_write(
        rows_cache.read_keys(slots), rows_cache.values.flatten(0, 1)[slots], again, slots
    )
    assert torch.equal(again.keys, panels_cache.keys)
    assert torch.equal(again.values, panels_cache.values)


def test_which_caches_have_panels(native: NativeLibrary) -> None:
    assert fit_panels(BF16, 32, [64, 256])
    assert not fit_panels(torch.float32, 16, [64])
    assert not fit_panels(torch.int8, 16, [64])
    assert not fit_panels(BF16, 24, [64])
    assert not fit_panels(BF16, 16, [64, 33])
    layout = KVLayout.uniform(2, 2, 8)
    assert PagedKVCache(layout, [3], 16, BF16, key_panels=True).layer(1).keys_in_panels
    assert not PagedKVCache(layout, [3], 8, BF16, key_panels=True).layer(1).keys_in_panels
    assert not PagedKVCache(layout, [3], 16, BF16).layer(1).keys_in_panels
    context = Context([20], BF16, key_panels=True)
    context.queries[0] = context.queries[0].float()
    with pytest.raises(ValueError, match="panels"):
        context.native(native, (0, 0, 20))


def test_copied_blocks_hold_the_same_keys() -> None:
    layout = KVLayout.of([LayerKV(2, 8), LayerKV(1, 16), LayerKV(2, 8, shared_with=0)])
    kv = PagedKVCache(layout, [4], 16, BF16, key_panels=True)
    fill_cache(kv, float("nan"))
    slots = torch.arange(16, 27)
    for layer, (heads, head_dim) in enumerate(((2, 8), (1, 16))):
        states = normal(len(slots), heads, head_dim, seed=layer, dtype=BF16)
        kv_cache_write(states, -states, kv.layer(layer), slots)
    kv.copy_blocks([DeviceCopy(0, 1, 3)])
    for layer in range(3):
        cache = kv.layer(layer)
        keys = cache.read_keys(slots)
        assert torch.equal(keys, cache.read_keys(slots + 32))
        assert torch.equal(keys, -cache.values.flatten(0, 1)[slots + 32])


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if "MoE" not in name])
def test_models_give_the_same_logits(tmp_path: Path, native: NativeLibrary, name: str) -> None:
    """Windows, layers that read another one's keys, values that are keys; the reference on the
    same kind of cache, and a step of each on what the other wrote."""
    write_tiny_model(name, tmp_path, BF16)
    reference = load_model(tmp_path, BF16).model
    model = make_native(load_model(tmp_path, BF16).model, native)
    ids = random_ids(70, model.config.vocab_size)
    texts = []
    for in_panels in (False, True):
        layout = model.config.kv_layout
        blocks = [16] * len(layout.groups)
        kv = PagedKVCache(layout, blocks, 16, BF16, key_panels=in_panels)
        assert kv.keys_in_panels == in_panels
        fill_cache(kv, float("nan"))
        rows = []
        for first, then in ((model, reference), (reference, model)):
            ours, other = (
                make_paged_sequence(ids, table) for table in ((3, 9, 1, 5, 7), (2, 8, 4, 6, 10))
            )
            rows.append(run_step(first, kv, (ours, 33), (other, 20), all_rows=True))
            rows += [run_step(first, kv, (ours, 1), (other, 9), all_rows=True) for _ in range(4)]
            rows.append(run_step(then, kv, (ours, 10), (other, 1), all_rows=True))
        texts.append(torch.cat(rows))
    assert torch.equal(*texts)
    assert bool(texts[0].isfinite().all())
