"""The queue, hand-over, limits, outputs and aborts."""

import pytest
from builders import fake_token, make_sampling
from dispatching import WORKER, add, added, give, make_capacity, make_dispatcher, make_ready, token

from shoal.scheduler.dispatched import Abort, Delivery
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.sequence import FinishReason


class TestHandOver:
    def test_waits_for_a_worker_then_goes_in_order(self) -> None:
        dispatcher = make_dispatcher()
        add(dispatcher, 3, 1, 2)
        assert dispatcher.poll(0.0) == []
        assert dispatcher.num_queued == 3
        dispatcher.worker_ready(WORKER, make_capacity())
        assert added(dispatcher.poll(0.0)) == [3, 1, 2]
        assert dispatcher.poll(0.0) == []
        assert (dispatcher.num_queued, dispatcher.num_live) == (0, 3)
        assert dispatcher.live_seq_ids == (3, 1, 2)

    def test_never_more_than_the_slots(self) -> None:
        dispatcher = make_ready(max_num_seqs=2)
        add(dispatcher, 0, 1, 2)
        assert added(dispatcher.poll(0.0)) == [0, 1]
        give(dispatcher, token(0, 0, FinishReason.STOP))
        assert added(dispatcher.poll(0.0)) == [2]

    def test_counts_what_no_report_shows_yet(self) -> None:
        dispatcher = make_ready(num_blocks=10)
        add(dispatcher, 0, 1, 2, num_prompt=63)  # 4 blocks each with the next token
        assert added(dispatcher.poll(0.0)) == [0, 1]
        # The worker has not seen them, or has run a first chunk only: still no room for the third.
        dispatcher.worker_status(WORKER, 10, 0, 0, 0)
        assert dispatcher.poll(0.0) == []
        dispatcher.worker_status(WORKER, 8, 2, 0, 1)
        assert dispatcher.poll(0.0) == []

    def test_counts_the_next_token(self) -> None:
        dispatcher = make_ready(num_blocks=3)
        add(dispatcher, 0, 1, num_prompt=16)
        assert added(dispatcher.poll(0.0)) == [0]  # 16 tokens and one more: 2 of 3 blocks
        assert dispatcher.poll(0.0) == []

    def test_counts_growth_by_outputs(self) -> None:
        dispatcher = make_ready(num_blocks=4)
        add(dispatcher, 0, num_prompt=30)
        dispatcher.poll(0.0)
        give(dispatcher, token(0, 0), token(0, 1))  # 32 tokens and one more: 3 blocks
        add(dispatcher, 1, num_prompt=16)
        assert dispatcher.poll(0.0) == []
        give(dispatcher, token(0, 2, FinishReason.STOP))
        assert added(dispatcher.poll(0.0)) == [1]

    def test_counts_no_more_than_a_kv_budget(self) -> None:
        dispatcher = make_ready(num_blocks=30)
        options = {"kv_policy": "h2o", "kv_budget": 150}  # 10 blocks
        add(dispatcher, 0, num_prompt=400, **options)
        add(dispatcher, 1, num_prompt=20, **options)  # 2 blocks
        assert added(dispatcher.poll(0.0)) == [0, 1]
        give(dispatcher, *(token(0, idx) for idx in range(40)))
        add(dispatcher, 2, num_prompt=287)  # 18 blocks are left
        assert added(dispatcher.poll(0.0)) == [2]

    def test_believes_a_report_of_less_than_it_expects(self) -> None:
        dispatcher = make_ready(num_blocks=10)
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        add(dispatcher, 1, num_prompt=60)
        dispatcher.worker_status(WORKER, 3, 1, 0, 1)  # 7 in use, 2 of them known
        assert dispatcher.poll(0.0) == []
        dispatcher.worker_status(WORKER, 8, 1, 0, 2)
        assert added(dispatcher.poll(0.0)) == [1]

    def test_a_report_of_what_it_knows_takes_no_room_twice(self) -> None:
        dispatcher = make_ready(num_blocks=10)
        add(dispatcher, 0, num_prompt=63)
        dispatcher.poll(0.0)
        dispatcher.worker_status(WORKER, 6, 1, 0, 1)
        add(dispatcher, 1, num_prompt=63)
        assert added(dispatcher.poll(0.0)) == [1]

    def test_the_prompt_is_copied(self) -> None:
        dispatcher = make_ready()
        prompt = [7] * 16
        dispatcher.add(0, prompt, make_sampling(), 0.0)
        dispatcher.poll(0.0)
        give(dispatcher, token(0, 0))
        assert prompt == [7] * 16

    def test_an_idle_worker_takes_the_head_whatever_it_reports(self) -> None:
        dispatcher = make_ready(num_blocks=10)
        dispatcher.worker_status(WORKER, 1, 0, 0, 5)
        add(dispatcher, 0, num_prompt=159)
        assert added(dispatcher.poll(0.0)) == [0]

    def test_nothing_passes_a_head_that_does_not_fit_yet(self) -> None:
        dispatcher = make_ready(num_blocks=10)
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        add(dispatcher, 1, num_prompt=150)
        add(dispatcher, 2)
        assert dispatcher.poll(0.0) == []
        give(dispatcher, token(0, 0, FinishReason.STOP))
        assert added(dispatcher.poll(0.0)) == [1]

    def test_the_emptier_worker_is_chosen(self) -> None:
        dispatcher = make_ready()
        dispatcher.worker_ready(2, make_capacity())
        add(dispatcher, 0, 1, 2, num_prompt=100)
        commands = dispatcher.poll(0.0)
        workers = [command.worker_id for command in commands]
        assert workers[0] != workers[1]
        assert sorted(workers) in ([1, 1, 2], [1, 2, 2])


class TestLimits:
    def test_full_queue_is_a_429_with_growing_retry_times(self) -> None:
        dispatcher = make_dispatcher(max_queued_requests=2)
        add(dispatcher, 0, 1)
        retries = []
        for seq_id in (2, 3):
            with pytest.raises(RequestError) as error:
                add(dispatcher, seq_id)
            assert (error.value.status, error.value.code) == (429, "queue_full")
            assert error.value.retry_after_ms is not None
            retries.append(error.value.retry_after_ms)
        assert 0 < retries[0] < retries[1]
        assert dispatcher.live_seq_ids == (0, 1)

    def test_retry_time_follows_the_service_time(self) -> None:
        def retry_after_ms(service_s: float) -> int:
            dispatcher = make_dispatcher(max_queued_requests=40)
            dispatcher.worker_ready(WORKER, make_capacity(max_num_seqs=1))
            add(dispatcher, *range(40))
            for seq_id in range(30):
                dispatcher.poll(0.0)
                dispatcher.outputs(WORKER, [token(seq_id, 0, FinishReason.STOP)], service_s)
            add(dispatcher, *range(40, 70))
            with pytest.raises(RequestError) as error:
                add(dispatcher, 99)
            assert error.value.retry_after_ms is not None
            return error.value.retry_after_ms

        assert 4_000 < retry_after_ms(5.0) < 6_000
        assert 100 <= retry_after_ms(0.001) < 200
        assert retry_after_ms(1e6) == 3_600_000

    def test_retry_times_shrink_as_places_come_free(self) -> None:
        def refuse(seq_id: int) -> int:
            with pytest.raises(RequestError) as error:
                add(dispatcher, seq_id)
            assert error.value.retry_after_ms is not None
            return error.value.retry_after_ms

        dispatcher = make_dispatcher(max_queued_requests=2)
        add(dispatcher, 0, 1)
        first, *_, fifth = [refuse(seq_id) for seq_id in range(100, 105)]
        dispatcher.worker_ready(WORKER, make_capacity(max_num_seqs=1))
        dispatcher.poll(0.0)  # one place comes free, so the next is told what the fifth was
        add(dispatcher, 2)
        assert refuse(105) == fifth
        for seq_id in range(3):  # the queue empties: nobody is ahead any more
            dispatcher.abort(seq_id)
        dispatcher.poll(0.0)
        add(dispatcher, 3)
        dispatcher.poll(0.0)
        add(dispatcher, 4, 5)
        assert refuse(106) == first

    def test_a_replay_is_never_refused(self) -> None:
        dispatcher = make_dispatcher(max_queued_requests=1)
        dispatcher.worker_ready(WORKER, make_capacity())
        for seq_id in range(3):
            add(dispatcher, seq_id)
            dispatcher.poll(0.0)
        add(dispatcher, 3)
        assert dispatcher.worker_dead(WORKER, 1.0) == []
        assert dispatcher.num_queued == 4

    def test_draining_refuses_new_and_finishes_old(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.drain()
        with pytest.raises(RequestError) as error:
            add(dispatcher, 1)
        assert (error.value.status, error.value.code) == (503, "draining")
        assert added(dispatcher.poll(0.0)) == [0]
        (delivery,) = give(dispatcher, token(0, 0, FinishReason.STOP))
        assert delivery.finish_reason is FinishReason.STOP
        assert dispatcher.num_live == 0

    def test_what_no_worker_can_hold_is_refused_at_once(self) -> None:
        dispatcher = make_dispatcher()
        dispatcher.worker_ready(WORKER, make_capacity(num_blocks=10, max_model_len=100))
        with pytest.raises(RequestError, match="maximum context length is 100 tokens") as error:
            add(dispatcher, 0, num_prompt=100)
        assert error.value.code == "context_length_exceeded"
        add(dispatcher, 1, num_prompt=99)
        assert added(dispatcher.poll(0.0)) == [1]

    def test_what_was_queued_before_and_can_never_fit_fails_when_a_worker_comes(self) -> None:
        dispatcher = make_dispatcher()
        add(dispatcher, 0, num_prompt=500)
        add(dispatcher, 1)
        (delivery,) = dispatcher.worker_ready(WORKER, make_capacity(num_blocks=10))
        assert delivery.seq_id == 0
        assert delivery.finish_reason is FinishReason.ERROR
        assert delivery.error is not None
        assert delivery.error.status == 400
        assert added(dispatcher.poll(0.0)) == [1]

    @pytest.mark.parametrize(("max_queued", "max_replays"), [(0, 3), (1, -1)])
    def test_config_is_checked(self, max_queued: int, max_replays: int) -> None:
        with pytest.raises(ValueError, match="at least"):
            DispatcherConfig(max_queued, max_replays)


class TestOutputs:
    def test_tokens_pass_and_the_finish_is_the_last(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        assert give(dispatcher, token(0, 0)) == [Delivery(0, fake_token(0, 0))]
        last = token(0, 1, FinishReason.LENGTH)
        assert give(dispatcher, last) == [Delivery(0, fake_token(0, 1), FinishReason.LENGTH)]
        assert give(dispatcher, token(0, 2), last) == []
        assert dispatcher.num_live == 0

    def test_cached_tokens_pass(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        (delivery,) = give(dispatcher, StepOutput(0, 0, fake_token(0, 0), None, 16))
        assert delivery.num_cached_tokens == 16

    def test_what_was_delivered_before_is_dropped(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        give(dispatcher, token(0, 0), token(0, 1))
        assert give(dispatcher, token(0, 0), token(0, 1)) == []
        assert give(dispatcher, token(0, 2)) == [Delivery(0, fake_token(0, 2))]

    def test_a_finish_is_not_dropped_with_its_doubled_token(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        give(dispatcher, token(0, 0))
        assert give(dispatcher, token(0, 0, FinishReason.STOP)) == [
            Delivery(0, None, FinishReason.STOP)
        ]

    def test_a_gap_fails_that_sequence_alone(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0, 1)
        dispatcher.poll(0.0)
        gap, fine = give(dispatcher, token(0, 1), token(1, 0))
        assert (gap.seq_id, gap.token, gap.finish_reason) == (0, None, FinishReason.ERROR)
        assert fine == Delivery(1, fake_token(1, 0))
        assert dispatcher.poll(0.0) == [Abort(WORKER, 0)]
        assert dispatcher.poll(0.0) == []

    def test_an_error_keeps_its_message(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        failed = StepOutput(0, 0, None, FinishReason.ERROR, error="The logits are not finite.")
        (delivery,) = give(dispatcher, failed)
        assert delivery.finish_reason is FinishReason.ERROR
        assert delivery.error is not None
        assert (delivery.error.status, str(delivery.error)) == (500, "The logits are not finite.")

    def test_only_the_worker_that_has_a_sequence_speaks_for_it(self) -> None:
        dispatcher = make_ready()
        dispatcher.worker_ready(2, make_capacity())
        add(dispatcher, 0)
        (command,) = dispatcher.poll(0.0)
        other = 2 if command.worker_id == WORKER else WORKER
        assert give(dispatcher, token(0, 0, FinishReason.STOP), worker_id=other) == []
        assert dispatcher.live_seq_ids == (0,)

    def test_unknown_sequences_and_workers_are_ignored(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        assert give(dispatcher, token(99, 0)) == []
        assert give(dispatcher, token(0, 0), worker_id=77) == []
        dispatcher.worker_status(77, 0, 0, 0, 0)
        assert dispatcher.worker_dead(77, 0.0) == []
        assert give(dispatcher, token(0, 0)) == [Delivery(0, fake_token(0, 0))]


class TestAbort:
    def test_queued_is_dropped_without_a_command(self) -> None:
        dispatcher = make_dispatcher()
        add(dispatcher, 0, 1)
        assert dispatcher.abort(0) == []
        dispatcher.worker_ready(WORKER, make_capacity())
        assert added(dispatcher.poll(0.0)) == [1]

    def test_on_a_worker_it_frees_the_room_at_once(self) -> None:
        dispatcher = make_ready(max_num_seqs=1)
        add(dispatcher, 0, 1)
        dispatcher.poll(0.0)
        assert dispatcher.abort(0) == [Abort(WORKER, 0)]
        assert added(dispatcher.poll(0.0)) == [1]
        assert give(dispatcher, token(0, 0, FinishReason.STOP)) == []

    def test_unknown_and_repeated_are_ignored(self) -> None:
        dispatcher = make_ready()
        add(dispatcher, 0)
        dispatcher.poll(0.0)
        dispatcher.abort(0)
        assert dispatcher.abort(0) == []
        assert dispatcher.abort(5) == []

    def test_fail_all_ends_everything_once(self) -> None:
        dispatcher = make_ready(max_num_seqs=1)
        add(dispatcher, 0, 1)
        dispatcher.poll(0.0)
        error = RequestError("Stopped.", status=503)
        deliveries = dispatcher.fail_all(error)
        assert [(d.seq_id, d.finish_reason, d.error) for d in deliveries] == [
            (0, FinishReason.ERROR, error),
            (1, FinishReason.ERROR, error),
        ]
        assert dispatcher.fail_all(error) == []
        assert dispatcher.poll(0.0) == [Abort(WORKER, 0)]
