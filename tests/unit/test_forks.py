"""Sequences that start from what another one has computed: shared blocks, copies, and ends."""

import pytest
import torch
from builders import FakeKVContents, make_scheduler, make_sequence, run_step
from tiny_checkpoint import write_tiny_checkpoint
from tiny_runs import generate

from shoal.backend.weights.loader import load_model
from shoal.scheduler.eviction import LruPolicy
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import FinishReason, Sequence
from shoal.scheduler.transfers import DeviceCopy

BLOCK_SIZE = 4
WAYS = {
    "plain": {},
    "cached": {"prefix_eviction": LruPolicy},
    "windows": {"windows": [(6, 64)]},
    "windows cached": {"windows": [(6, 64)], "prefix_eviction": LruPolicy},
}


@pytest.fixture(params=WAYS)
def options(request) -> dict:
    chosen = dict(WAYS[request.param])
    if "prefix_eviction" in chosen:
        chosen["prefix_eviction"] = chosen["prefix_eviction"]()
    return {"block_size": BLOCK_SIZE, **chosen}


def make_child(seq_id: int, num_prompt_tokens: int, **options) -> Sequence:
    return make_sequence(seq_id, num_prompt_tokens, prompt_seed=0, **options)


def start(scheduler: Scheduler, num_prompt: int, num_children: int, **options) -> list[Sequence]:
    family = [make_sequence(0, num_prompt, **options)]
    scheduler.add(family[0])
    for seq_id in range(1, num_children + 1):
        family.append(make_child(seq_id, num_prompt, **options))
        scheduler.fork(0, family[-1])
    return family


def finish(scheduler: Scheduler, contents: FakeKVContents) -> int:
    """Run to the end; the number of tokens that were computed."""
    num_tokens = 0
    while scheduler.has_unfinished:
        num_tokens += sum(run_step(scheduler, contents=contents).num_tokens.values())
    assert scheduler.free_blocks == scheduler.kv.pool.num_blocks
    return num_tokens


def test_a_prompt_is_computed_once(options):
    scheduler, contents = make_scheduler(max_num_batched_tokens=8, **options), FakeKVContents()
    start(scheduler, 30, 3, max_tokens=5)
    # The prompt; its last token again for each child; and what each samples but the last.
    assert finish(scheduler, contents) == 30 + 3 + 4 * 4


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_full_blocks_are_shared_and_a_part_filled_one_copied(options, max_tokens):
    scheduler, contents = make_scheduler(**options), FakeKVContents()
    parent, *children = start(scheduler, 11, 2, max_tokens=max_tokens)
    run_step(scheduler, contents=contents)
    if max_tokens == 1:
        assert parent.finish_reason is FinishReason.LENGTH
    output = scheduler.schedule()
    tables = [child.block_tables for child in children]
    num_groups = len(tables[0])
    assert all(one[:2] == other[:2] for one, other in zip(*tables, strict=True))
    sources = {copy.source for copy in output.transfers if copy.group == 0}
    assert len(sources) == 1
    assert output.transfers == tuple(
        DeviceCopy(group, output.transfers[group].source, table[group][2])
        for table in tables
        for group in range(num_groups)
    )
    if max_tokens > 1:
        assert sources == {parent.block_table[2]}
        assert parent.block_table[:2] == children[0].block_table[:2]


def test_without_a_part_filled_block_nothing_is_copied(options):
    scheduler, contents = make_scheduler(**options), FakeKVContents()
    start(scheduler, 9, 1)
    run_step(scheduler, contents=contents)
    assert scheduler.schedule().transfers == ()


def test_children_that_find_no_slot_come_first_later(options):
    scheduler, contents = make_scheduler(max_num_seqs=2, **options), FakeKVContents()
    start(scheduler, 9, 3, max_tokens=6)
    order = list(run_step(scheduler, contents=contents).num_tokens)
    scheduler.add(make_sequence(9, 5))
    while scheduler.has_unfinished:
        step = run_step(scheduler, contents=contents)
        order += [seq_id for seq_id in step.num_tokens if seq_id not in order]
    assert order == [0, 1, 2, 3, 9]


def test_a_fork_in_the_middle_of_an_answer_shares_what_was_said(options):
    scheduler, contents = make_scheduler(**options), FakeKVContents()
    parent = make_sequence(0, 10, max_tokens=20)
    scheduler.add(parent)
    for _ in range(8):
        run_step(scheduler, contents=contents)
    child = make_child(1, 10, max_tokens=20)
    child.token_ids[:] = parent.token_ids[:17] + [77]
    scheduler.fork(0, child)
    step = run_step(scheduler, contents=contents)
    # Of an answer, what the window left behind is kept nowhere: no cached prefix ends there.
    lost = len(options) == 3
    assert step.num_tokens == {0: 1, 1: 18 - 8 if lost else 1}
    assert len(step.output.transfers) == (0 if lost else len(child.block_tables))
    finish(scheduler, contents)


@pytest.mark.parametrize("budget", [8, 512])
def test_the_first_child_stands_in_for_a_parent_that_leaves_early(options, budget):
    scheduler = make_scheduler(max_num_batched_tokens=budget, **options)
    contents = FakeKVContents()
    start(scheduler, 30, 3, max_tokens=5)
    if budget == 8:
        run_step(scheduler, contents=contents)
    scheduler.abort(0)
    scheduler.check_integrity()
    num_computed = finish(scheduler, contents)
    assert num_computed <= 30 + 2 + 3 * 4


def test_a_failed_parent_harms_no_child(options):
    scheduler, contents = make_scheduler(**options), FakeKVContents()
    family = start(scheduler, 30, 2, max_tokens=5)
    run_step(scheduler, failed={0: "broken"}, contents=contents)
    finish(scheduler, contents)
    reasons = [sequence.finish_reason for sequence in family]
    assert reasons == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_child_leaves_the_others_alone(options, num_steps):
    scheduler, contents = make_scheduler(**options), FakeKVContents()
    family = start(scheduler, 11, 3, max_tokens=5)
    for _ in range(num_steps):
        run_step(scheduler, contents=contents)
    assert scheduler.abort(2)
    finish(scheduler, contents)
    reasons = [sequence.finish_reason for sequence in family]
    assert reasons == [FinishReason.LENGTH] * 2 + [FinishReason.CANCELLED, FinishReason.LENGTH]


def test_under_pressure_parents_and_children_are_preempted_and_all_end(options):
    options = {**options, "num_blocks": 12}
    if "windows" in options:
        options["windows"] = [(6, 12)]
    scheduler, contents = make_scheduler(**options), FakeKVContents()
    family = start(scheduler, 18, 5, max_tokens=12)
    finish(scheduler, contents)
    assert scheduler.num_preemptions > 0
    assert {sequence.finish_reason for sequence in family} == {FinishReason.LENGTH}


def test_a_fork_of_a_sequence_that_is_gone_is_a_sequence_like_others(options):
    scheduler, contents = make_scheduler(**options), FakeKVContents()
    child = make_child(1, 10)
    scheduler.fork(0, child)
    finish(scheduler, contents)
    assert child.finish_reason is FinishReason.LENGTH


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("llama")), torch.float32)


@pytest.mark.parametrize("num_blocks", [64, 14])
@pytest.mark.parametrize("cached", [True, False])
def test_forked_choices_have_the_texts_that_they_have_alone(llama, cached, num_blocks):
    def choices() -> list[Sequence]:
        return [
            make_child(seq_id, 18, seed=seq_id, temperature=1.0, max_tokens=12)
            for seq_id in range(4)
        ]

    alone = {}
    for sequence in choices():
        alone |= generate(llama, [sequence]).texts
    forked = generate(
        llama,
        choices(),
        forks_of=0,
        num_blocks=num_blocks,
        max_num_batched_tokens=8,
        prefix_eviction=LruPolicy() if cached else None,
    )
    assert forked.texts == alone
    assert len({tuple(text) for text in alone.values()}) == 4
    assert (forked.scheduler.num_preemptions > 0) == (num_blocks == 14)


@pytest.mark.parametrize("windows", [(), ((5, 64),)])
@pytest.mark.parametrize("num_prompt", [8, 10, 11, 12, 13, 14])
def test_a_prompt_that_is_cached_whole_leaves_one_token(num_prompt, windows):
    """Whether it ends with a block, inside one that its answer filled, or one that it did not."""
    contents = FakeKVContents()
    scheduler = make_scheduler(block_size=BLOCK_SIZE, prefix_eviction=LruPolicy(), windows=windows)
    scheduler.add(make_sequence(0, num_prompt, max_tokens=2 if num_prompt == 14 else 3))
    finish(scheduler, contents)
    again = [make_child(seq_id, num_prompt, max_tokens=3) for seq_id in (1, 2)]
    for sequence in again:
        scheduler.add(sequence)
    step = run_step(scheduler, contents=contents)
    assert step.num_tokens == {1: 1, 2: 1}
    assert [sequence.num_cached_tokens for sequence in again] == [num_prompt - 1] * 2
    assert finish(scheduler, contents) == 4
    scheduler.check_integrity()


def test_a_last_block_is_computed_where_none_is_free_for_a_copy():
    contents = FakeKVContents()
    scheduler = make_scheduler(
        num_blocks=4, block_size=BLOCK_SIZE, prefix_eviction=LruPolicy(), max_model_len=16
    )
    for seq_id, seed in enumerate((0, 1)):
        scheduler.add(make_sequence(seq_id, 8, prompt_seed=seed, max_tokens=1))
        finish(scheduler, contents)
    assert scheduler.kv.pool.num_free == 0
    scheduler.add(make_child(2, 8, max_tokens=1))
    assert run_step(scheduler, contents=contents).num_tokens == {2: BLOCK_SIZE}
    scheduler.check_integrity()


def test_a_prompt_that_is_cached_whole_gives_the_same_text(llama):
    first, *others = (make_child(seq_id, 12, max_tokens=6, temperature=0.0) for seq_id in range(3))
    again = generate(llama, [first], rounds=[others], prefix_eviction=LruPolicy())
    assert [sequence.num_cached_tokens for sequence in others] == [11, 11]
    assert not again.failed
    assert again.texts[1] == again.texts[2] == again.texts[0]
