"""Eviction policies, alone and in the tree."""

from itertools import pairwise

import pytest

from shoal.scheduler.eviction import LfuPolicy, LruPolicy, NodeUsage, ReusePolicy
from shoal.scheduler.prefix_tree import PrefixTree
from shoal.scheduler.reuse_model import ReuseModel

SALT = b""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_usage(features: tuple[int, ...] = (1,), num_uses: int = 1) -> NodeUsage:
    return NodeUsage(1, 0, 0, 0.0, 0, num_uses=num_uses, features=features)


def use(tree: PrefixTree, token_ids: list[int]) -> int:
    """One request with one-token blocks named after their tokens; returns its hits."""
    match = tree.match(SALT, token_ids)
    tree.insert(SALT, token_ids, match.block_ids + token_ids[match.num_tokens :], 10)
    return match.num_tokens


def test_lru_evicts_the_longest_unused_first() -> None:
    tree = PrefixTree(1, LruPolicy())
    for token in (1, 2, 3, 1):
        use(tree, [token])
    assert tree.evict(3) == [2, 3, 1]


def test_lfu_evicts_the_fewest_hits_first_and_the_older_of_equals() -> None:
    tree = PrefixTree(1, LfuPolicy())
    for token in (1, 1, 1, 2, 3, 3, 4):
        use(tree, [token])
    assert tree.evict(4) == [2, 4, 3, 1]


def test_fork_shares_out_the_blocks() -> None:
    usage = NodeUsage(5, 2, 1, 3.0, 4, num_uses=2)
    head = usage.fork(2)
    assert (head.num_blocks, usage.num_blocks) == (2, 3)
    assert (head.turn, head.last_used, head.num_hits) == (1, 3.0, 1)


def test_the_model_learns_which_runs_come_back() -> None:
    model = ReuseModel()
    now = 0.0
    for _ in range(300):
        good, dead = make_usage((1,)), make_usage((2,))
        for usage in (good, dead):
            usage.last_used = now
            model.begin(usage, now)
        now += 60.0
        model.returned(good, now)
        good.num_uses += 1
    fresh_good, fresh_dead = make_usage((1,)), make_usage((2,))
    for usage in (fresh_good, fresh_dead):
        usage.last_used = now
    good_density, _ = model.hit_density(fresh_good, now)
    dead_density, _ = model.hit_density(fresh_dead, now)
    assert good_density > 5 * dead_density


def test_the_model_values_a_run_most_shortly_before_its_usual_return() -> None:
    model = ReuseModel()
    now = 0.0
    for _ in range(300):
        usage = make_usage()
        usage.last_used = now
        model.begin(usage, now)
        now += 60.0
        model.returned(usage, now)
        usage.num_uses += 1
    usage = make_usage()
    usage.last_used = now
    just_used, changes_at = model.hit_density(usage, now)
    expected, _ = model.hit_density(usage, now + 55.0)
    overdue, _ = model.hit_density(usage, now + 600.0)
    assert now < changes_at
    assert expected > just_used > overdue


def test_late_stray_returns_make_no_second_peak() -> None:
    model = ReuseModel()
    now = 0.0
    for index in range(400):
        usage = make_usage()
        usage.last_used = now
        model.begin(usage, now)
        now += 900.0 if index % 10 == 0 else 10.0
        model.returned(usage, now)
        usage.num_uses += 1
    usage = make_usage()
    densities = [model.hit_density(usage, edge + 0.01)[0] for edge in model.edges if edge > 15.0]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(densities))


def test_open_observations_are_bounded() -> None:
    model = ReuseModel(max_open=50)
    for _ in range(500):
        model.begin(make_usage(), 0.0)
    assert sum(len(queue) for queue in model._open) == 50


def test_the_ghost_history_is_bounded_and_gives_back_what_it_knew() -> None:
    policy = ReusePolicy(max_ghost_blocks=2)
    usage = NodeUsage(3, 0, 0, 0.0, 0)
    for key in (1, 2, 3):
        policy.on_evict(usage, key)
    assert policy.num_ghost_blocks == usage.num_blocks == 2
    assert policy.recall(1) is None
    assert policy.recall(3) is usage
    assert policy.recall(3) is None


def test_a_run_that_returns_after_eviction_takes_up_its_history() -> None:
    clock = Clock()
    tree = PrefixTree(1, ReusePolicy(100), clock)
    for _ in range(3):
        use(tree, [1, 2, 3])
        clock.now += 10.0
    tree.evict(3)
    assert use(tree, [1, 2, 3]) == 0
    assert tree.match(SALT, [1, 2, 3]).node.usage.num_hits == 3
    tree.check_integrity()


def test_a_tail_that_returns_keeps_the_depths_right() -> None:
    tree = PrefixTree(1, ReusePolicy(100))
    use(tree, [1, 2, 3, 4, 5])
    tree.evict(3)
    use(tree, [1, 2, 3, 4, 5])
    node = tree.match(SALT, [1, 2, 3, 4, 5]).node
    while node.parent is not None:
        assert node.usage.depth == node.token_ids[0] - 1
        node = node.parent
    tree.check_integrity()


@pytest.mark.parametrize("depth", [0, 8])
def test_recompute_cost_raises_the_score_of_deep_blocks(depth: int) -> None:
    policy = ReusePolicy(10, attention_parity_blocks=8.0)
    plain = ReusePolicy(10)
    usage = make_usage()
    usage.depth = depth
    expected = plain.score(usage, 1.0).value * (1 + depth / 8)
    assert policy.score(usage, 1.0).value == pytest.approx(expected)


def test_reuse_keeps_shared_prompts_through_scans_that_flush_lru() -> None:
    def count_hits(policy: LruPolicy | ReusePolicy) -> int:
        clock = Clock()
        tree = PrefixTree(1, policy, clock)
        hits = 0
        fresh = 1000
        for index in range(600):
            clock.now += 1.0
            if index % 2:
                request = list(range(fresh, fresh + 20))
                fresh += 20
            else:
                prompt = 10 * (index // 2 % 12)
                request = [*range(prompt, prompt + 8), fresh]
                fresh += 1
            hits += use(tree, request)
            tree.evict(max(0, tree.num_blocks - 150))
        return hits

    assert count_hits(ReusePolicy(600)) > 1.5 * count_hits(LruPolicy()) + 100
