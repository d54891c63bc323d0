import pytest
from builders import make_sequence

from shoal.scheduler.block_pool import BlockPool
from shoal.scheduler.kv_manager import KVCacheManager


def make_kv(num_blocks: int = 8, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks, block_size))


def test_table_grows_only_at_block_borders() -> None:
    kv = make_kv()
    sequence = make_sequence(num_prompt_tokens=7)
    assert kv.allocate_slots(sequence, 7) == [0, 1]
    sequence.num_computed_tokens = 7
    assert kv.allocate_slots(sequence, 1) == []
    sequence.num_computed_tokens = 8
    assert kv.allocate_slots(sequence, 1) == [2]
    assert sequence.block_table == [0, 1, 2]
    kv.check_integrity([sequence])


def test_what_does_not_fit_changes_nothing() -> None:
    kv = make_kv(num_blocks=2)
    sequence = make_sequence(num_prompt_tokens=9)
    assert kv.allocate_slots(sequence, 9) is None
    assert sequence.block_table == []
    assert kv.num_free_blocks == 2
    assert kv.allocate_slots(sequence, 8) == [0, 1]


def test_slots_follow_the_block_table() -> None:
    kv = make_kv()
    other, sequence = make_sequence(0, 4), make_sequence(1, 10)
    kv.allocate_slots(sequence, 4)
    kv.allocate_slots(other, 4)
    sequence.num_computed_tokens = 3
    kv.allocate_slots(sequence, 7)
    assert sequence.block_table == [0, 2, 3]
    assert kv.slot_mapping(sequence, 7) == [3, 8, 9, 10, 11, 12, 13]


def test_freeing_gives_everything_back() -> None:
    kv = make_kv()
    sequence = make_sequence(num_prompt_tokens=20)
    kv.allocate_slots(sequence, 20)
    kv.free(sequence)
    assert sequence.block_table == []
    assert kv.num_free_blocks == 8
    kv.check_integrity([])


def test_the_head_of_a_prompt_is_reused_last() -> None:
    kv = make_kv(num_blocks=3)
    sequence = make_sequence(num_prompt_tokens=12)
    kv.allocate_slots(sequence, 12)
    kv.free(sequence)
    assert kv.pool.allocate(3) == [2, 1, 0]


def test_integrity_check_sees_a_leak_and_a_missing_block() -> None:
    kv = make_kv()
    sequence = make_sequence(num_prompt_tokens=8)
    kv.allocate_slots(sequence, 8)
    with pytest.raises(AssertionError, match="leaked"):
        kv.check_integrity([])
    sequence.num_computed_tokens = 9
    with pytest.raises(AssertionError):
        kv.check_integrity([sequence])
