import itertools

import pytest
from builders import (
    EOS,
    fake_token,
    make_scheduler,
    make_sequence,
    run_step,
    run_until_token,
)

from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.scheduler import Scheduler, SchedulerConfig
from shoal.scheduler.sequence import FinishReason, SequenceStatus
from shoal.scheduler.step_limits import StepLimits


def start_decodes(scheduler: Scheduler, count: int, max_tokens: int = 512) -> range:
    """Add sequences and run them until all decode."""
    seq_ids = range(count)
    for seq_id in seq_ids:
        scheduler.add(make_sequence(seq_id, 8, max_tokens=max_tokens))
    waiting = set(seq_ids)
    while waiting:
        waiting -= run_step(scheduler).seq_ids_with_token
    return seq_ids


def large_scheduler() -> Scheduler:
    return make_scheduler(
        num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=16384
    )


def finish(scheduler: Scheduler, seq_id: int) -> list[StepOutput]:
    """Run until the sequence has finished; its outputs."""
    results = []
    while scheduler.has_unfinished:
        results += [result for result in run_step(scheduler).results if result.seq_id == seq_id]
        if results and results[-1].finish_reason:
            return results
    raise AssertionError("it never finished")


class TestOneSequence:
    def test_prefill_then_one_token_a_step_then_length(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(5, 16, max_tokens=3))
        steps = [run_step(scheduler) for _ in range(3)]
        assert [step.num_tokens for step in steps] == [{5: 16}, {5: 1}, {5: 1}]
        results = [result for step in steps for result in step.results]
        assert [r.output_index for r in results] == [0, 1, 2]
        assert [r.token for r in results] == [fake_token(5, i) for i in range(3)]
        assert [r.finish_reason for r in results] == [None, None, FinishReason.LENGTH]
        assert not scheduler.has_unfinished
        assert scheduler.free_blocks == 64

    def test_long_prompt_runs_in_chunks_and_samples_only_at_its_end(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=100)
        scheduler.add(make_sequence(0, 250))
        steps = [run_step(scheduler) for _ in range(3)]
        assert [step.num_tokens[0] for step in steps] == [100, 100, 50]
        assert [len(step.results) for step in steps] == [0, 0, 1]

    def test_replayed_sequence_goes_on_where_it_was(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0, 16, num_output_tokens=5, max_tokens=7))
        results = finish(scheduler, 0)
        assert [r.output_index for r in results] == [5, 6]
        assert results[0].token == fake_token(0, 5)
        assert results[-1].finish_reason is FinishReason.LENGTH

    def test_nothing_to_do_is_an_empty_step(self) -> None:
        output = make_scheduler().schedule()
        assert output.scheduled == ()
        assert output.num_tokens == 0

    def test_a_prompt_without_room_for_a_token_is_refused(self) -> None:
        scheduler = make_scheduler(max_model_len=32)
        with pytest.raises(RequestError, match="maximum context length is 32 tokens") as error:
            scheduler.add(make_sequence(0, 32))
        assert error.value.code == "context_length_exceeded"
        assert not scheduler.has_unfinished


class TestFinish:
    @pytest.mark.parametrize(
        ("sampling", "token_id", "expected"),
        [
            ({}, EOS, FinishReason.STOP),
            ({"ignore_eos": True}, EOS, None),
            ({"stop_token_ids": (7,)}, 7, FinishReason.STOP),
            ({"stop_token_ids": (7,), "ignore_eos": True}, 7, FinishReason.STOP),
            ({"stop_token_ids": (7,)}, 8, None),
            ({"min_tokens": 2}, EOS, None),
            ({"min_tokens": 2, "stop_token_ids": (7,)}, 7, None),
            ({"min_tokens": 1}, EOS, FinishReason.STOP),
            ({"max_tokens": 1}, EOS, FinishReason.STOP),
            ({"max_tokens": 1}, 8, FinishReason.LENGTH),
            ({"max_tokens": 1, "ignore_eos": True}, EOS, FinishReason.LENGTH),
        ],
    )
    def test_first_token(
        self, sampling: dict[str, object], token_id: int, expected: FinishReason | None
    ) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence(0, **sampling)
        scheduler.add(sequence)
        (result,) = run_step(scheduler, tokens={0: token_id}).results
        assert result.finish_reason is expected
        assert result.token is not None
        assert result.token.token_id == token_id
        assert sequence.is_finished == (expected is not None)

    def test_every_eos_id_counts(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0, eos_token_ids=frozenset({2, 32})))
        (result,) = run_step(scheduler, tokens={0: 32}).results
        assert result.finish_reason is FinishReason.STOP

    def test_context_is_filled_to_its_last_token(self) -> None:
        scheduler = make_scheduler(num_blocks=2, max_model_len=32)
        scheduler.add(make_sequence(0, 20, max_tokens=None))
        results = finish(scheduler, 0)
        assert len(results) == 12
        assert results[-1].finish_reason is FinishReason.LENGTH

    def test_a_failed_sequence_leaves_the_others_alone(self) -> None:
        scheduler = make_scheduler()
        for seq_id in range(3):
            scheduler.add(make_sequence(seq_id))
        results = {r.seq_id: r for r in run_step(scheduler, failed={1: "NaN logits"}).results}
        assert results[1].finish_reason is FinishReason.ERROR
        assert results[1].error == "NaN logits"
        assert results[1].token is None
        assert results[0].token == fake_token(0, 0)
        assert results[2].token == fake_token(2, 0)
        assert scheduler.num_running == 2

    def test_a_sequence_may_fail_amid_its_prefill(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=32)
        scheduler.add(make_sequence(0, 100))
        (result,) = run_step(scheduler, failed={0: "broken"}).results
        assert result.finish_reason is FinishReason.ERROR
        assert scheduler.free_blocks == 64


class TestAbort:
    def test_running_and_waiting_and_unknown(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        running, waiting = make_sequence(0), make_sequence(1)
        scheduler.add(running)
        scheduler.add(waiting)
        run_step(scheduler)
        assert scheduler.abort(1)
        assert scheduler.abort(0)
        assert not scheduler.abort(0)
        assert not scheduler.abort(99)
        assert running.finish_reason is FinishReason.CANCELLED
        assert not scheduler.has_unfinished
        assert scheduler.free_blocks == 64
        scheduler.check_integrity()

    def test_amid_a_chunked_prefill(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=32)
        scheduler.add(make_sequence(0, 100))
        run_step(scheduler)
        assert scheduler.free_blocks == 62
        scheduler.abort(0)
        assert scheduler.free_blocks == 64

    def test_while_its_step_runs_drops_its_token(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(0))
        scheduler.add(make_sequence(1))
        output = scheduler.schedule()
        scheduler.abort(0)
        sampled = {seq_id: fake_token(seq_id, 0) for seq_id in (0, 1)}
        results = scheduler.update_from_output(output, sampled)
        assert [result.seq_id for result in results] == [1]
        scheduler.check_integrity()


class TestFairness:
    @pytest.mark.parametrize("num_decodes", [4, 60])
    def test_short_prompt_beside_decodes(self, num_decodes: int) -> None:
        scheduler = large_scheduler()
        decodes = start_decodes(scheduler, num_decodes)
        scheduler.add(make_sequence(100, 16))
        step = run_step(scheduler)
        assert step.seq_ids_with_token == {*decodes, 100}

    @pytest.mark.parametrize("num_decodes", [4, 60])
    @pytest.mark.parametrize("num_long", [1, 3])
    def test_short_prompt_beside_decodes_and_long_prefills(
        self, num_decodes: int, num_long: int
    ) -> None:
        scheduler = large_scheduler()
        decodes = start_decodes(scheduler, num_decodes)
        for seq_id in range(70, 70 + num_long):
            scheduler.add(make_sequence(seq_id, 12000))
        for _ in range(3):
            assert run_step(scheduler).seq_ids_with_token == set(decodes)
        scheduler.add(make_sequence(100, 16))
        step = run_step(scheduler)
        assert step.seq_ids_with_token == {*decodes, 100}
        assert step.output.num_tokens == 512

    def test_prompt_of_half_the_budget_beside_a_long_prefill_takes_two_steps(self) -> None:
        scheduler = large_scheduler()
        start_decodes(scheduler, 4)
        scheduler.add(make_sequence(70, 12000))
        run_step(scheduler)
        scheduler.add(make_sequence(100, 256))
        assert run_until_token(scheduler, 100) == 2

    def test_a_dozen_short_prompts_at_once_beside_a_long_prefill(self) -> None:
        scheduler = large_scheduler()
        start_decodes(scheduler, 30)
        scheduler.add(make_sequence(70, 12000))
        run_step(scheduler)
        short = set(range(100, 112))
        for seq_id in short:
            scheduler.add(make_sequence(seq_id, 16))
        assert short <= run_step(scheduler).seq_ids_with_token

    def test_long_prompt_keeps_half_the_budget_under_a_flood_of_short_ones(self) -> None:
        scheduler = large_scheduler()
        scheduler.add(make_sequence(0, 4000))
        short_ids = itertools.count(1)
        for _ in range(4000 // 256):
            for seq_id in itertools.islice(short_ids, 20):
                scheduler.add(make_sequence(seq_id, 40, max_tokens=1))
            assert run_step(scheduler).num_tokens[0] >= 256
        assert 0 in run_step(scheduler).seq_ids_with_token

    def test_decodes_come_first_even_if_nothing_else_fits_the_budget(self) -> None:
        scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
        start_decodes(scheduler, 3)
        scheduler.add(make_sequence(9, 10))
        for _ in range(10):
            assert run_step(scheduler).num_tokens == {0: 1, 1: 1, 2: 1, 9: 1}

    def test_a_prompt_gets_its_part_beside_urgent_ones_where_all_take_turns(self) -> None:
        scheduler = large_scheduler()
        for seq_id in range(4):
            sequence = make_sequence(seq_id, 1000)
            sequence.urgency = 1 if seq_id else -1
            scheduler.add(sequence)
        run_step(scheduler)
        scheduler.limits = StepLimits(max_num_tokens=2)  # every second step is the first one's
        parts = [run_step(scheduler).num_tokens.get(0, 0) for _ in range(20)]
        assert sum(parts) == 10

    def test_a_sequence_joins_when_another_leaves(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        scheduler.add(make_sequence(0, max_tokens=2))
        scheduler.add(make_sequence(1, max_tokens=9))
        scheduler.add(make_sequence(2, max_tokens=9))
        run_step(scheduler)
        assert run_step(scheduler).seq_ids_with_token == {0, 1}
        assert run_step(scheduler).seq_ids_with_token == {1, 2}


class TestPreemption:
    def test_latest_arrival_yields_and_recomputes(self) -> None:
        scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
        first = make_sequence(0, 30, max_tokens=20)
        second = make_sequence(1, 30, max_tokens=10)
        scheduler.add(first)
        scheduler.add(second)
        for _ in range(3):  # both now need a third block, and none is free
            run_step(scheduler)
        step = run_step(scheduler)
        assert step.output.preempted == (1,)
        assert step.seq_ids_with_token == {0}
        assert second.status is SequenceStatus.PREEMPTED
        assert second.num_computed_tokens == 0
        assert second.num_preemptions == scheduler.num_preemptions == 1
        results = finish(scheduler, 1)
        assert [r.output_index for r in results] == list(range(3, 10))
        assert first.is_finished
        assert scheduler.free_blocks == 4

    def test_preempted_sequences_keep_their_place(self) -> None:
        scheduler = make_scheduler(num_blocks=6, max_num_seqs=3)
        for seq_id in range(3):
            scheduler.add(make_sequence(seq_id, 31, max_tokens=40))
        scheduler.add(make_sequence(3, 5, max_tokens=60))
        finished = []
        while scheduler.has_unfinished:
            finished += [r.seq_id for r in run_step(scheduler).results if r.finish_reason]
        assert finished == [0, 1, 2, 3]
        assert scheduler.num_preemptions > 0

    def test_a_victim_that_had_its_tokens_in_this_step_gives_them_up(self) -> None:
        # The earlier sequence prefills, the later decodes; the pool runs out under the earlier.
        scheduler = make_scheduler(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=8)
        scheduler.add(make_sequence(0, 63, max_tokens=30))
        scheduler.add(make_sequence(1, 4, max_tokens=60))
        steps = []
        while scheduler.has_unfinished:
            steps.append(run_step(scheduler))
        for step in steps:
            assert not set(step.output.preempted) & set(step.num_tokens)
        finished = [r.seq_id for step in steps for r in step.results if r.finish_reason]
        assert sorted(finished) == [0, 1]

    def test_a_preempted_sequence_waits_until_it_can_stay(self) -> None:
        scheduler = make_scheduler(num_blocks=9, max_num_seqs=3)
        victim = make_sequence(2, 47, max_tokens=9)
        for sequence in (make_sequence(0, 31), make_sequence(1, 62, max_tokens=30), victim):
            scheduler.add(sequence)
        for _ in range(4):
            run_step(scheduler)
        assert victim.status is SequenceStatus.PREEMPTED
        scheduler.abort(0)
        # It would just fit, with no block left for the other to grow into.
        assert scheduler.free_blocks == 4
        assert scheduler.kv.num_missing_blocks(victim, victim.num_tokens + 1) == 4
        run_step(scheduler)
        assert victim.status is SequenceStatus.PREEMPTED
        scheduler.abort(1)
        run_step(scheduler)
        assert victim.status is SequenceStatus.RUNNING

    def test_prompts_that_cannot_all_be_held_are_not_started_together(self) -> None:
        scheduler = make_scheduler(num_blocks=10, max_num_seqs=4, max_num_batched_tokens=32)
        for seq_id in range(3):
            scheduler.add(make_sequence(seq_id, 100, max_tokens=2))
        run_step(scheduler)
        assert scheduler.num_running == 1
        while scheduler.has_unfinished:
            run_step(scheduler)
        assert scheduler.num_preemptions == 0


class TestConfig:
    def test_every_running_sequence_must_fit_the_budget(self) -> None:
        with pytest.raises(ValueError, match="max_num_batched_tokens"):
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7, max_model_len=64)

    @pytest.mark.parametrize(("max_num_seqs", "max_model_len"), [(0, 64), (1, 1)])
    def test_limits_must_allow_something(self, max_num_seqs: int, max_model_len: int) -> None:
        with pytest.raises(ValueError, match="at least"):
            SchedulerConfig(max_num_seqs, 64, max_model_len)

    def test_the_longest_sequence_must_fit_the_pool(self) -> None:
        with pytest.raises(ValueError, match="at most 64"):
            make_scheduler(num_blocks=4, max_model_len=65)
