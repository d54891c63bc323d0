"""What sequences hold of layers with a sliding window, and when a cached prefix is usable."""

import pytest
from builders import FakeKVContents, make_scheduler, make_sequence, run_step

from shoal.scheduler.eviction import LruPolicy
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.window_blocks import HOLE, most_window_blocks

BLOCK_SIZE = 4
WINDOW = 10


def make_hybrid(num_window_blocks: int = 64, cached: bool = True, **options) -> Scheduler:
    return make_scheduler(
        block_size=BLOCK_SIZE,
        windows=[(WINDOW, num_window_blocks)],
        prefix_eviction=LruPolicy() if cached else None,
        **options,
    )


def run(scheduler: Scheduler, *sequences, contents: FakeKVContents | None = None) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_unfinished:
        run_step(scheduler, contents=contents)


@pytest.mark.parametrize("budget", [8, 512])
def test_a_long_sequence_holds_its_window_alone(budget):
    scheduler = make_hybrid(cached=False, max_num_batched_tokens=budget)
    (window,) = scheduler.kv.windows
    sequence = make_sequence(num_prompt_tokens=60, max_tokens=40)
    scheduler.add(sequence)
    most = 0
    while scheduler.has_unfinished:
        run_step(
            scheduler,
        )
        used = window.pool.num_blocks - window.pool.num_free
        if sequence.num_output_tokens > 1:  # the chunk before the first token may be long
            most = max(most, used)
    assert most == 4  # 9 tokens and the one to compute, ending anywhere in a block
    assert window.pool.num_free == window.pool.num_blocks


def test_dropped_entries_are_holes_and_the_table_keeps_its_length():
    scheduler = make_hybrid(cached=False)
    sequence = make_sequence(num_prompt_tokens=30, max_tokens=8)
    scheduler.add(sequence)
    run_step(scheduler)
    run_step(scheduler)
    full, windowed = sequence.block_tables
    assert len(full) == len(windowed) == 8
    assert windowed[:5] == [HOLE] * 5  # position 30 sees 21 … 30
    assert HOLE not in windowed[5:]


def test_a_prompt_branches_anywhere_while_its_window_blocks_are_cached():
    scheduler, contents = make_hybrid(max_num_batched_tokens=8), FakeKVContents()
    shared = make_sequence(0, 40).token_ids
    run(scheduler, make_sequence(0, 40, max_tokens=1), contents=contents)
    for seq_id, num_shared in enumerate([20, 8, 32, 40], start=1):
        sequence = make_sequence(seq_id, 60, max_tokens=4)
        sequence.token_ids[:num_shared] = shared[:num_shared]
        run(scheduler, sequence, contents=contents)
        assert sequence.num_cached_tokens == num_shared


def test_a_hit_shortens_to_where_the_window_is_still_cached():
    scheduler, contents = make_hybrid(), FakeKVContents()
    run(scheduler, make_sequence(0, 40, max_tokens=1), contents=contents)
    (window,) = scheduler.kv.windows
    tree = scheduler.kv.prefix_tree
    path = tree.match(b"", make_sequence(0, 40).token_ids).block_ids

    def hit(seq_id: int) -> int:
        again = make_sequence(seq_id, 41, prompt_seed=0, max_tokens=1)
        run(scheduler, again, contents=contents)
        return again.num_cached_tokens

    assert hit(1) == 40
    window.forget([path[8]])  # tokens 32 … 35: position 40 sees 31 … 40
    assert hit(2) == 32  # which cached it anew
    window.forget(path[1:3] + path[6:7])
    assert hit(3) == 40  # those are behind the window of position 40
    window.forget([path[8]])
    assert hit(4) == 24  # of 32, 28 and 24 the first whose window, 15 … 24, is whole
    window.forget(path)
    assert hit(5) == 0


def test_a_short_pool_of_a_window_bounds_how_many_run():
    budget = 16
    enough_for_two = most_window_blocks(WINDOW, BLOCK_SIZE, 2, budget)
    scheduler = make_hybrid(enough_for_two, num_blocks=200, max_num_batched_tokens=budget)
    contents = FakeKVContents()
    for seq_id in range(6):
        scheduler.add(make_sequence(seq_id, 50, max_tokens=30))
    most_running = 0
    while scheduler.has_unfinished:
        step = run_step(scheduler, contents=contents)
        assert not step.output.preempted
        most_running = max(most_running, scheduler.num_running)
    assert most_running == 2


def test_a_pool_too_short_for_one_sequence_is_refused():
    fewest = most_window_blocks(WINDOW, BLOCK_SIZE, 1, 16)
    options = {"num_blocks": 200, "max_num_batched_tokens": 16}
    make_hybrid(fewest, **options)
    with pytest.raises(ValueError, match="sliding window"):
        make_hybrid(fewest - 1, **options)


def test_cached_window_blocks_make_way_least_recently_used_first():
    scheduler = make_hybrid(12, num_blocks=200, max_num_batched_tokens=16)
    contents = FakeKVContents()
    run(scheduler, make_sequence(0, 24, max_tokens=1), contents=contents)
    run(scheduler, make_sequence(1, 24, max_tokens=1), contents=contents)
    run(scheduler, make_sequence(2, 24, max_tokens=1), contents=contents)
    newest = make_sequence(3, 25, prompt_seed=2, max_tokens=1)
    oldest = make_sequence(4, 25, prompt_seed=0, max_tokens=1)
    run(scheduler, newest, contents=contents)
    run(scheduler, oldest, contents=contents)
    assert newest.num_cached_tokens == 24
    assert oldest.num_cached_tokens == 0


def test_the_integrity_check_sees_a_leak_and_a_missing_block():
    scheduler = make_hybrid()
    sequence = make_sequence(num_prompt_tokens=30, max_tokens=8)
    scheduler.add(sequence)
    run_step(scheduler)
    (window,) = scheduler.kv.windows
    held, sequence.block_tables[1][-1] = sequence.block_tables[1][-1], HOLE
    with pytest.raises(AssertionError, match="a hole behind"):
        scheduler.check_integrity()
    sequence.block_tables[1][-1] = held
    window.pool.allocate(1)
    with pytest.raises(AssertionError, match="leaked"):
        scheduler.check_integrity()
