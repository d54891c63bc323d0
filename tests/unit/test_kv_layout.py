import torch

from shoal.backend.kv_cache import PagedKVCache, bytes_per_block
from shoal.backend.kv_layout import KVLayout, LayerKV

HYBRID = KVLayout.of(
    [
        LayerKV(1, 8, window=4),
        LayerKV(2, 4),
        LayerKV(1, 8, window=4),
        LayerKV(1, 16),
        LayerKV(1, 8, window=4, shared_with=0),
    ]
)


def test_layers_of_equal_window_are_a_group_and_the_full_ones_the_first():
    assert [group.window for group in HYBRID.groups] == [None, 4]
    assert [group.layers for group in HYBRID.groups] == [(1, 3), (0, 2)]
    assert HYBRID.group_of == (1, 0, 1, 0, 1)
    assert HYBRID.source_of == (0, 1, 2, 3, 0)
    assert HYBRID.windows == (4,)


def test_equal_layers_are_one_group():
    layout = KVLayout.uniform(3, 2, 8)
    assert [group.layers for group in layout.groups] == [(0, 1, 2)]
    assert layout.windows == ()
    assert bytes_per_block(layout, 16, torch.bfloat16) == (3 * 2 * 2 * 8 * 16 * 2,)


def test_a_layer_may_read_the_cache_of_an_earlier_one():
    kv = PagedKVCache(HYBRID, [5, 3], 2, torch.float32)
    assert kv.keys(4).data_ptr() == kv.keys(0).data_ptr()
    assert [tuple(kv.values(idx).shape) for idx in range(4)] == [
        (3, 2, 1, 8),
        (5, 2, 2, 4),
        (3, 2, 1, 8),
        (5, 2, 1, 16),
    ]
    sizes = bytes_per_block(HYBRID, 2, torch.float32)
    assert kv.num_bytes == 5 * sizes[0] + 3 * sizes[1]
    kv.keys(1)[:] = 7  # keys and values, and layers, are apart
    assert not kv.values(1).any()
    assert not kv.keys(3).any()
