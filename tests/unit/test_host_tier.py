"""The books of host memory: checkpoints, prefixes, disk."""

import random
from dataclasses import replace

import pytest

from shoal.scheduler.host_prefixes import DiskIndex
from shoal.scheduler.host_tier import HostTier
from shoal.scheduler.path_digests import path_digests
from shoal.scheduler.prefix_nodes import EvictedRun
from shoal.scheduler.return_cost import ReturnCosts
from shoal.scheduler.transfers import BlockCopy, DiskLoad, DiskResult, DiskStore

SIZE = 4
CHEAP_COPIES = ReturnCosts((1e-4,), (1e-4,), 1e-3)
SALT = b"tenant"


def make_tier(num_blocks=6, costs=CHEAP_COPIES, disk=None, num_groups=1):
    costs = replace(costs, save_s=costs.save_s * num_groups, restore_s=costs.restore_s * num_groups)
    return HostTier([num_blocks] * num_groups, SIZE, costs, disk=disk)


def tokens(num_blocks, seed=0):
    return [seed * 1000 + i for i in range(num_blocks * SIZE)]


def run_of(token_ids, first, block_ids, salt=SALT):
    """Blocks of a path, from its block ``first`` on, as the tree gives them up."""
    end = (first + len(block_ids)) * SIZE
    digests = path_digests(salt, token_ids[:end], SIZE)
    return EvictedRun(salt, first * SIZE, token_ids[first * SIZE : end], block_ids, digests[first:])


def match(tier, token_ids, start=0, salt=SALT, seq_id=1):
    tier.prefixes.forget_sequence(seq_id)
    return tier.prefixes.match(seq_id, salt, token_ids, start, len(token_ids))


def test_a_checkpoint_goes_out_and_comes_back_by_group():
    tier = make_tier(num_groups=2)
    tier.save(7, 9, [[5, 3, 8], [None, 2, 4]])
    out = tier.take_transfers()
    assert [(c.to_device, c.group, c.device_block) for c in out] == [
        (False, 0, 5),
        (False, 0, 3),
        (False, 0, 8),
        (False, 1, 2),
        (False, 1, 4),
    ]
    assert tier.pool.num_used == 3
    tier.restore(7, [[1, 2, 3], [None, 6, 7]])
    back = tier.take_transfers()
    assert [(c.to_device, c.group, c.device_block) for c in back] == [
        (True, 0, 1),
        (True, 0, 2),
        (True, 0, 3),
        (True, 1, 6),
        (True, 1, 7),
    ]
    assert [c.host_block for c in back] == [c.host_block for c in out]
    assert tier.pool.num_used == 0
    tier.pool.check_integrity([7])


def test_a_checkpoint_without_room_is_not_offered():
    tier = make_tier(num_blocks=3)
    assert tier.pool.has_room([3])
    tier.save(1, 8, [[0, 1]])
    assert not tier.pool.has_room([2])
    tier.forget(1)
    assert tier.pool.has_room([3])


def test_cached_prefixes_give_way_to_a_checkpoint():
    tier = make_tier(num_blocks=3)
    tier.demote(run_of(tokens(3), 0, [4, 5, 6]))
    assert tier.pool.has_room([2])
    tier.save(1, 8, [[0, 1]])
    found = match(tier, tokens(3))
    assert len(found) == 1  # the beginning stayed, the end went
    tier.pool.check_integrity([1])


def test_evicted_blocks_are_found_again_under_the_same_salt_and_path():
    tier = make_tier()
    path = tokens(4)
    tier.demote(run_of(path, 2, [8, 9]))
    copies = tier.take_transfers()
    assert [(c.to_device, c.device_block) for c in copies] == [(False, 9), (False, 8)]
    assert match(tier, path) == []  # their beginning is not here
    found = match(tier, path, start=2)
    assert [entry.token_ids for entry in found] == [tuple(path[8:12]), tuple(path[12:16])]
    assert match(tier, path, start=2, salt=b"another") == []
    other = [path[0] + 1, *path[1:]]
    assert match(tier, other, start=2) == []


def test_equal_digests_do_not_suffice_the_tokens_are_compared():
    tier = make_tier()
    path, other = tokens(1), tokens(1, seed=5)
    run = run_of(path, 0, [3])
    tier.demote(replace(run, token_ids=other))
    assert match(tier, path) == []


def test_what_went_back_to_the_device_stays_and_costs_no_second_copy():
    tier = make_tier()
    tier.demote(run_of(tokens(2), 0, [3, 4]))
    tier.take_transfers()
    found = match(tier, tokens(2))
    tier.restore_prefix(found, [6, 7])
    back = tier.take_transfers()
    assert [(c.to_device, c.device_block) for c in back] == [(True, 6), (True, 7)]
    tier.demote(run_of(tokens(2), 0, [6, 7]))
    assert tier.take_transfers() == ()
    assert tier.pool.num_used == 2


def test_the_least_recently_used_goes_first():
    tier = make_tier(num_blocks=2)
    tier.demote(run_of(tokens(1, 1), 0, [3]))
    tier.demote(run_of(tokens(1, 2), 0, [4]))
    tier.restore_prefix(match(tier, tokens(1, 1)), [5])
    tier.demote(run_of(tokens(1, 3), 0, [6]))
    assert [len(match(tier, tokens(1, seed))) for seed in (1, 2, 3)] == [1, 0, 1]


def test_where_computing_is_cheaper_than_copying_nothing_is_kept():
    tier = make_tier(costs=ReturnCosts((1.0,), (1.0,), 1e-3))
    assert tier.prefixes is None
    tier.demote(run_of(tokens(1), 0, [3]))
    assert tier.take_transfers() == ()


def test_a_full_host_writes_to_disk_and_reads_on_a_hit():
    tier = make_tier(num_blocks=1, disk=DiskIndex(10))
    path = tokens(1, 1)
    tier.demote(run_of(path, 0, [3]))
    tier.demote(run_of(tokens(1, 2), 0, [4]))
    (digest,) = path_digests(SALT, path, SIZE)
    save, store, second = tier.take_transfers()
    assert store == DiskStore(save.host_block, digest, tuple(path))
    assert isinstance(second, BlockCopy)
    assert tier.take_disk_results([DiskResult(digest, loaded=False, ok=True)]) == []
    prefixes = tier.prefixes
    prefixes.load(1, SALT, path, 0, SIZE)
    other_store, load = tier.take_transfers()
    assert isinstance(other_store, DiskStore)
    assert load == DiskLoad(save.host_block, digest, tuple(path))
    assert prefixes.is_loading(1, SALT, path, 0, SIZE)
    assert match(tier, path) == []
    tier.prefixes.forget_sequence(1)
    prefixes.load(1, SALT, path, 0, SIZE)
    assert tier.take_transfers() == ()  # it is on its way already
    tier.take_disk_results([DiskResult(digest, loaded=True, ok=True)])
    assert not prefixes.is_loading(1, SALT, path, 0, SIZE)
    assert len(match(tier, path)) == 1
    tier.pool.check_integrity([])


def test_a_load_that_fails_is_a_miss_for_good():
    digest_path = tokens(1)
    (digest,) = path_digests(SALT, digest_path, SIZE)
    tier = make_tier(disk=DiskIndex(10, [digest]))
    tier.prefixes.load(1, SALT, digest_path, 0, SIZE)
    tier.take_disk_results([DiskResult(digest, loaded=True, ok=False)])
    assert not tier.prefixes.is_loading(1, SALT, digest_path, 0, SIZE)
    assert match(tier, digest_path) == []
    assert tier.pool.num_used == 0
    tier.take_transfers()
    tier.prefixes.load(2, SALT, digest_path, 0, SIZE)
    assert tier.take_transfers() == ()


def test_the_disk_is_bounded_and_drops_its_least_recently_used():
    disk = DiskIndex(2)
    assert disk.add(b"a") == []
    assert disk.add(b"b") == []
    disk.touch(b"a")
    assert disk.add(b"c") == [b"b"]
    assert len(disk) == 2
    assert DiskIndex(2, [b"x", b"y", b"z"]).add(b"w") == [b"y"]


def test_a_full_disk_gives_up_its_oldest_and_grows_again_later():
    now = [0.0]
    disk = DiskIndex(5, [b"a", b"b", b"c"], clock=lambda: now[0])
    tier = make_tier(disk=disk)
    full = DiskResult(b"d", loaded=False, ok=False, disk_full=True)
    assert tier.take_disk_results([full]) == [b"a"]
    assert tier.take_disk_results([DiskResult(b"e", loaded=False, ok=True)]) == [b"b"]
    assert len(disk) == 2
    now[0] = 31.0
    for name in (b"f", b"g", b"h"):
        assert tier.take_disk_results([DiskResult(name, loaded=False, ok=True)]) == []
    assert tier.take_disk_results([DiskResult(b"i", loaded=False, ok=True)]) == [b"c"]
    for _ in range(7):
        tier.take_disk_results([full])
    assert len(disk) == 0
    assert tier.take_disk_results([DiskResult(b"j", loaded=False, ok=True)]) == []
    assert b"j" in disk
    other_fault = DiskResult(b"k", loaded=False, ok=False)
    assert tier.take_disk_results([other_fault]) == []
    assert b"j" in disk


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_books(seed):
    rng = random.Random(seed)
    tier = make_tier(num_blocks=8, disk=DiskIndex(6))
    on_disk, loading, saved = set(), set(), set()
    for _ in range(2000):
        path = tokens(rng.randint(1, 4), rng.randint(0, 3))
        action = rng.random()
        if action < 0.3:
            first = rng.randrange(len(path) // SIZE)
            count = len(path) // SIZE - first
            tier.demote(run_of(path, first, rng.sample(range(100), count)))
        elif action < 0.5:
            tier.restore_prefix(found := match(tier, path), list(range(len(found))))
        elif action < 0.6:
            tier.prefixes.load(0, SALT, path, 0, len(path))
            tier.prefixes.forget_sequence(0)
        elif action < 0.8 and (orders := sorted(on_disk | loading)):
            digest = rng.choice(orders)
            results = [DiskResult(digest, digest in loading, rng.random() < 0.8)]
            tier.take_disk_results(results)
            on_disk.discard(digest)
            loading.discard(digest)
        elif len(saved) < 3 and tier.pool.has_room([2]):
            seq_id = max(saved, default=10) + 1
            saved.add(seq_id)
            tier.save(seq_id, 7, [[1, 2]])
        elif saved:
            seq_id = saved.pop()
            tier.restore(seq_id, [[3, 4]]) if rng.random() < 0.5 else tier.forget(seq_id)
        for transfer in tier.take_transfers():
            if isinstance(transfer, DiskStore):
                on_disk.add(transfer.digest)
            elif isinstance(transfer, DiskLoad):
                assert transfer.digest not in loading
                loading.add(transfer.digest)
                on_disk.discard(transfer.digest)
        tier.pool.check_integrity(saved)
