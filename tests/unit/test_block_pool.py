import pytest

from shoal.scheduler.block_pool import BlockPool, num_blocks_for


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_num_blocks_rounds_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 16) == expected


def test_allocates_each_block_once_then_nothing() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.allocate(3), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_too_large_a_request_takes_nothing() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_blocks_freed_first_are_reused_first() -> None:
    pool = BlockPool(3, 16)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([2])
    pool.free([0, 1])
    assert pool.allocate(3) == [2, 0, 1]


def test_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.incref(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    assert pool.ref_count(blocks[0]) == 1
    pool.free(blocks)
    assert pool.num_free == 2
    pool.check_integrity()


def test_our_own_mistakes_are_caught() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([0])
    with pytest.raises(AssertionError, match="is free"):
        pool.incref([0])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks, block_size)
