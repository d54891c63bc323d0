"""The prefix tree: what it finds, what it owns, and that nothing leaks under random use."""

import random
from dataclasses import dataclass, field

import pytest

from shoal.scheduler.eviction import EvictionPolicy, LfuPolicy, LruPolicy, ReusePolicy
from shoal.scheduler.path_digests import path_digests, prompt_digest
from shoal.scheduler.prefix_nodes import EvictedRun, PrefixLock
from shoal.scheduler.prefix_tree import PADDING, PrefixTree

BLOCK = 4
SALT = b"tenant"


def make_tree(policy: EvictionPolicy | None = None, **options: object) -> PrefixTree:
    return PrefixTree(BLOCK, policy or LruPolicy(), **options)  # type: ignore[arg-type]


def tokens(*first: int) -> list[int]:
    """A block of tokens for each number."""
    return [10 * number + offset for number in first for offset in range(BLOCK)]


def test_match_finds_the_longest_prefix_in_full_blocks() -> None:
    tree = make_tree()
    tree.insert(SALT, [*tokens(1, 2, 3), 99], [7, 8, 9, 10], 1)
    assert tree.num_blocks == 3  # the part-filled block stayed out

    assert tree.match(SALT, tokens(1, 2, 3, 4)).block_ids == [7, 8, 9]
    assert tree.match(SALT, tokens(1, 2, 5)).block_ids == [7, 8]
    assert tree.match(SALT, tuple(tokens(1, 2, 5))).block_ids == [7, 8]
    assert tree.match(SALT, tokens(1, 2)[:-1]).block_ids == [7]
    assert tree.match(SALT, tokens(2, 3)).num_tokens == 0
    tree.check_integrity()


def test_max_tokens_leaves_the_last_token_to_compute() -> None:
    tree = make_tree()
    prompt = tokens(1, 2, 3)
    tree.insert(SALT, prompt, [0, 1, 2], 1)
    match = tree.match(SALT, prompt, max_tokens=len(prompt) - 1)
    assert match.num_tokens == 8
    assert match.block_ids == [0, 1]


def test_a_block_that_begins_with_a_prompts_last_tokens() -> None:
    tree = make_tree()
    tree.insert(SALT, tokens(1, 2, 3), [0, 1, 2], 1)  # one run
    tree.insert(SALT, [*tokens(1, 4), 7, 7, 7, 7], [0, 5, 6], 1)  # two, from the first block on

    def after(*prefix: int, rest: list[int]) -> int | None:
        return tree.block_after(tree.match(SALT, tokens(*prefix)), rest)

    assert after(1, rest=[20, 21]) == 1
    assert after(1, rest=[40]) == 5
    assert after(1, rest=tokens(4)) == 5
    assert after(1, rest=[20, 22]) is None
    assert after(1, rest=tokens(5)) is None
    assert after(1, 2, rest=[30, 31, 32]) == 2  # within a run
    assert after(1, 2, rest=[40]) is None
    assert after(1, 2, 3, rest=[7]) is None
    tree.check_integrity()


def test_a_block_that_is_full_in_part() -> None:
    runs: list[EvictedRun] = []
    tree = make_tree(on_demote=runs.append)
    prompt = [*tokens(1, 2), 7, 8]
    tree.insert(SALT, [*prompt, PADDING, PADDING], [0, 1, 2], 1)
    for number in range(3, 100):  # many branches
        tree.insert(SALT, tokens(1, 2, number), [0, 1, number], 1)
    match = tree.match(SALT, prompt)
    assert match.block_ids == [0, 1]
    assert tree.block_after(match, [7, 8]) == 2
    assert tree.block_after(match, [7]) == 2
    assert tree.block_after(match, [8]) is None
    tree.check_integrity()
    assert sorted(tree.evict(1000)) == [*range(100)]
    assert sorted(block for run in runs for block in run.block_ids) == [0, 1, *range(3, 100)]
    assert all(PADDING not in run.token_ids for run in runs)


def test_only_the_whole_blocks_of_a_run_are_demoted() -> None:
    runs: list[EvictedRun] = []
    tree = make_tree(on_demote=runs.append)
    tree.insert(SALT, [*tokens(1, 2), 7, *[PADDING] * 3], [4, 5, 6], 1)
    assert tree.evict(2) == [6, 5]
    assert tree.evict(2) == [4]
    assert [run.block_ids for run in runs] == [[5], [4]]
    assert [run.token_ids for run in runs] == [tokens(2), tokens(1)]
    digests = path_digests(SALT, tokens(1, 2), BLOCK)
    assert [run.path_digests for run in runs] == [digests[1:], digests[:1]]


def test_salts_are_apart() -> None:
    tree = make_tree()
    tree.insert(b"a", tokens(1, 2), [0, 1], 1)
    assert tree.match(b"b", tokens(1, 2)).num_tokens == 0
    assert tree.insert(b"b", tokens(1, 2), [2, 3], 1).duplicate_block_ids == []
    assert tree.num_blocks == 4
    tree.check_integrity()


def test_insert_reports_duplicates_but_not_blocks_it_lent() -> None:
    tree = make_tree()
    tree.insert(SALT, tokens(1, 2), [0, 1], 1)
    lent = tree.match(SALT, tokens(1, 2, 3)).block_ids
    result = tree.insert(SALT, tokens(1, 2, 3), [*lent, 2], 1)
    assert result.duplicate_block_ids == []
    assert result.match.block_ids == [0, 1, 2]

    twin = tree.insert(SALT, tokens(1, 2, 4), [5, 6, 7], 1)
    assert twin.duplicate_block_ids == [5, 6]
    assert twin.match.block_ids == [0, 1, 7]
    tree.check_integrity()


def test_locked_paths_stay_and_unlocked_ones_go_from_the_leaves() -> None:
    tree = make_tree()
    tree.insert(SALT, tokens(1, 2, 3, 4), [0, 1, 2, 3], 1)
    lock = tree.lock(tree.match(SALT, tokens(1, 2, 9)))
    assert tree.num_evictable == 2
    assert tree.evict(10) == [3, 2]
    assert tree.evict(10) == []
    tree.check_integrity()
    tree.unlock(lock)
    assert tree.evict(1) == [1]
    assert tree.match(SALT, tokens(1, 2)).block_ids == [0]
    assert tree.evict(1) == [0]
    assert tree.num_blocks == tree.num_evictable == 0
    tree.check_integrity()


def test_a_split_keeps_the_locks_of_both_parts() -> None:
    tree = make_tree()
    tree.insert(SALT, tokens(1, 2, 3), [0, 1, 2], 1)
    whole = tree.lock(tree.match(SALT, tokens(1, 2, 3)))
    part = tree.lock(tree.match(SALT, tokens(1, 7)))
    tree.unlock(part)
    assert tree.evict(3) == []
    tree.unlock(whole)
    assert sorted(tree.evict(3)) == [0, 1, 2]
    tree.check_integrity()


def test_locks_on_misses_of_one_new_salt_share_its_root() -> None:
    tree = make_tree()
    misses = [tree.match(SALT, tokens(1)) for _ in range(2)]
    first, second = (tree.lock(miss) for miss in misses)
    tree.unlock(first)
    tree.insert(SALT, tokens(1), [0], 1)
    tree.unlock(second)
    assert tree.match(SALT, tokens(1)).block_ids == [0]
    tree.check_integrity()


def test_a_stale_match_and_a_second_unlock_are_refused() -> None:
    tree = make_tree()
    tree.insert(SALT, tokens(1, 2), [0, 1], 1)
    stale = tree.match(SALT, tokens(1, 2))
    tree.evict(1)
    with pytest.raises(AssertionError, match="changed"):
        tree.lock(stale)
    lock = tree.lock(tree.match(SALT, tokens(1)))
    tree.unlock(lock)
    with pytest.raises(AssertionError, match="twice"):
        tree.unlock(lock)


def test_exact_index_follows_splits_and_evictions() -> None:
    tree = make_tree()
    prompt = tokens(1, 2, 3)
    tree.index_prompt(tree.insert(SALT, prompt, [0, 1, 2], 1).match, SALT, prompt)
    found = tree.match_exact(SALT, [*prompt, 99])
    assert found is not None
    assert found.block_ids == [0, 1, 2]
    assert tree.match_exact(b"other", prompt) is None
    assert tree.match_exact(SALT, tokens(1, 2)) is None

    tree.insert(SALT, tokens(1, 5), [0, 9], 1)
    tree.check_integrity()
    found = tree.match_exact(SALT, prompt)
    assert found is not None
    assert found.block_ids == [0, 1, 2]
    tree.evict(1)
    assert tree.match_exact(SALT, prompt) is None
    tree.check_integrity()


def test_an_exact_hit_is_verified_by_real_tokens() -> None:
    tree = make_tree()
    prompt, forged = tokens(1, 2), tokens(3, 4)
    tree.index_prompt(tree.insert(SALT, prompt, [0, 1], 1).match, SALT, prompt)
    node = tree._exact[prompt_digest(SALT, prompt)]
    digest = prompt_digest(SALT, forged)  # as if the two digests collided
    tree._exact[digest] = node
    node.exact[digest] = 2
    assert tree.match_exact(SALT, forged) is None


def test_the_demotion_hook_gets_what_it_takes_to_find_the_blocks_again() -> None:
    runs: list[EvictedRun] = []
    tree = make_tree(on_demote=runs.append)
    tree.insert(SALT, tokens(1, 2, 3), [0, 1, 2], 1)
    tree.evict(2)
    (run,) = runs
    assert (run.salt, run.num_prefix_tokens, run.block_ids) == (SALT, BLOCK, [1, 2])
    assert run.token_ids == tokens(2, 3)
    assert run.path_digests == path_digests(SALT, tokens(1, 2, 3), BLOCK)[1:]
    assert path_digests(b"other", tokens(1), BLOCK) != path_digests(SALT, tokens(1), BLOCK)


def test_a_running_sequence_is_not_its_own_hit() -> None:
    tree = make_tree()
    tree.insert(SALT, tokens(1, 2), [0, 1])  # after prefill
    node = tree.insert(SALT, tokens(1, 2, 3), [0, 1, 2], 5).match.node
    assert node.usage.num_hits == 0
    assert node.parent is not None
    assert node.parent.usage.num_hits == 0
    tree.insert(SALT, tokens(1, 2), [0, 1], 5)
    assert node.parent.usage.num_hits == 1
    assert node.usage.num_hits == 0


def cached_block_ids(tree: PrefixTree) -> list[int]:
    nodes = list(tree._roots.values())
    for node in nodes:
        nodes += node.children.values()
    return [block_id for node in nodes for block_id in node.block_ids]


@dataclass
class Driver:
    """Random users of one tree, with the block accounts a KV manager would keep."""

    tree: PrefixTree
    rng: random.Random
    free: list[int]
    running: list[tuple[bytes, list[int], list[int], PrefixLock]] = field(default_factory=list)

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.45:
            self.start()
        elif choice < 0.85:
            self.finish()
        else:
            self.free += self.tree.evict(self.rng.randint(1, 6))

    def start(self) -> None:
        salt = self.rng.choice([b"a", b"b"])
        prompt = [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 40))]
        match = self.tree.match(salt, prompt, len(prompt) - 1)
        assert self.tree_tokens(match.block_ids) == prompt[: match.num_tokens]
        lock = self.tree.lock(match)
        missing = len(prompt) // BLOCK - len(match.block_ids)
        if len(self.free) < missing:
            self.free += self.tree.evict(missing - len(self.free))
        if len(self.free) < missing:
            self.tree.unlock(lock)
            return
        own = [self.free.pop() for _ in range(missing)]
        for index, block_id in enumerate(own, len(match.block_ids)):
            self.contents[block_id] = prompt[index * BLOCK : (index + 1) * BLOCK]
        self.running.append((salt, prompt, match.block_ids + own, lock))

    def finish(self) -> None:
        if not self.running:
            return
        salt, prompt, block_ids, lock = self.running.pop(self.rng.randrange(len(self.running)))
        if self.rng.random() < 0.2:  # aborted: its own blocks were never shared
            shared = self.tree.match(salt, prompt).block_ids
            self.free += [block_id for block_id in block_ids if block_id not in shared]
        else:
            result = self.tree.insert(salt, prompt, block_ids, self.rng.randint(0, 9))
            self.free += result.duplicate_block_ids
            if self.rng.random() < 0.5:
                self.tree.index_prompt(result.match, salt, prompt)
        self.tree.unlock(lock)

    contents: dict[int, list[int]] = field(default_factory=dict)

    def tree_tokens(self, block_ids: list[int]) -> list[int]:
        return [token for block_id in block_ids for token in self.contents[block_id]]

    def check(self, num_blocks: int) -> None:
        self.tree.check_integrity()
        assert len(set(self.free)) == len(self.free)
        held = {block_id for _, _, block_ids, _ in self.running for block_id in block_ids}
        assert held.isdisjoint(self.free)
        cached = set(cached_block_ids(self.tree))
        assert cached.isdisjoint(self.free)
        assert cached | held | set(self.free) == set(range(num_blocks))


@pytest.mark.parametrize("policy", [LruPolicy(), LfuPolicy(), ReusePolicy(64)])
def test_random_use_leaks_nothing_and_returns_the_right_blocks(policy: EvictionPolicy) -> None:
    num_blocks = 60
    driver = Driver(make_tree(policy), random.Random(5), list(range(num_blocks)))
    for _ in range(7000):
        driver.step()
        driver.check(num_blocks)
    while driver.running:
        driver.finish()
    driver.check(num_blocks)
    assert driver.tree.num_evictable == driver.tree.num_blocks
    driver.free += driver.tree.evict(num_blocks)
    assert sorted(driver.free) == list(range(num_blocks))
    assert not driver.tree._roots
