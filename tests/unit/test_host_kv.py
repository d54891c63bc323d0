import random

import pytest
import torch

from shoal.backend.host_kv import HostKV
from shoal.backend.kv_cache import PagedKVCache, bytes_per_block
from shoal.backend.kv_layout import KVLayout, LayerKV
from shoal.scheduler.transfers import BlockCopy, DeviceCopy

LAYOUT = KVLayout.of([LayerKV(2, 4), LayerKV(1, 8, window=6), LayerKV(2, 4), LayerKV(1, 8, 6, 1)])
BLOCKS = (12, 9)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def cache(request):
    cache = PagedKVCache(LAYOUT, BLOCKS, 4, request.param)
    generator = torch.Generator().manual_seed(0)
    for group in (0, 1):
        for part in cache.block_parts(group):
            part.copy_(50 * torch.randn(part.shape, generator=generator))
    return cache


def contents(cache, group, block):
    return torch.cat([part[:, block].flatten() for part in cache.block_parts(group)])


def test_blocks_come_back_bit_for_bit_and_no_other_block_changes(cache):
    host = HostKV(cache, (5, 5))
    for group in (0, 1):
        before = [contents(cache, group, block) for block in range(BLOCKS[group])]
        host.copy([BlockCopy(False, group, block, i) for i, block in enumerate([7, 2, 8])])
        host.copy([BlockCopy(True, group, block, i) for i, block in enumerate([4, 7, 1])])
        expected = before.copy()
        expected[4], expected[7], expected[1] = before[7], before[2], before[8]
        for block in range(BLOCKS[group]):
            assert torch.equal(contents(cache, group, block), expected[block]), block


def test_a_long_random_chain_of_copies_keeps_its_order(cache):
    rng = random.Random(0)
    host = HostKV(cache, (6, 6))
    device = [[contents(cache, group, b) for b in range(BLOCKS[group])] for group in (0, 1)]
    pool = [[None] * 6 for _ in (0, 1)]
    copies = []
    for _ in range(400):
        group = rng.randrange(2)
        device_block, host_block = rng.randrange(BLOCKS[group]), rng.randrange(6)
        to_device = rng.random() < 0.5 and pool[group][host_block] is not None
        copies.append(BlockCopy(to_device, group, device_block, host_block))
        if to_device:
            device[group][device_block] = pool[group][host_block]
        else:
            pool[group][host_block] = device[group][device_block]
    host.copy(copies)
    for group in (0, 1):
        for block in range(BLOCKS[group]):
            assert torch.equal(contents(cache, group, block), device[group][block])


def test_the_contents_of_a_block_as_bytes(cache):
    host = HostKV(cache, (3, 3))
    size = bytes_per_block(LAYOUT, 4, cache.keys(0).dtype)[0]
    assert host.block_bytes(0) == size
    host.copy([BlockCopy(False, 0, 5, 1)])
    payload = host.read(1)
    assert len(payload) == size
    host.write(2, payload)
    host.copy([BlockCopy(True, 0, 6, 2)])
    assert torch.equal(contents(cache, 0, 6), contents(cache, 0, 5))


def test_a_block_is_copied_bit_for_bit_and_no_other_changes(cache):
    for group in (0, 1):
        expected = [contents(cache, group, block) for block in range(BLOCKS[group])]
        cache.copy_blocks([DeviceCopy(group, 7, 2), DeviceCopy(group, 2, 0)])  # in this order
        expected[2] = expected[0] = expected[7]
        for block in range(BLOCKS[group]):
            assert torch.equal(contents(cache, group, block), expected[block]), block


def test_a_copy_beyond_the_cache_is_refused(cache):
    for copy in (DeviceCopy(1, 0, BLOCKS[1]), DeviceCopy(1, BLOCKS[1], 0), DeviceCopy(0, -1, 0)):
        with pytest.raises(AssertionError):
            cache.copy_blocks([copy])
