"""What becomes of the sequences of a worker that died."""

from builders import fake_token
from dispatching import WORKER, add, added, give, make_capacity, make_dispatcher, make_ready, token

from shoal.scheduler.dispatched import Abort, Add, Delivery
from shoal.scheduler.sequence import FinishReason


def test_nothing_is_sent_to_a_dead_worker() -> None:
    dispatcher = make_ready()
    add(dispatcher, 0)
    dispatcher.poll(0.0)
    give(dispatcher, token(0, 1))  # a gap: an abort is due
    dispatcher.worker_dead(WORKER, 1.0)
    assert dispatcher.poll(1.0) == []


def test_goes_on_in_place_with_its_outputs() -> None:
    dispatcher = make_ready(max_num_seqs=2)
    add(dispatcher, 5, 4, 3)
    dispatcher.poll(0.0)
    give(dispatcher, token(4, 0), token(4, 1))
    assert dispatcher.worker_dead(WORKER, 1.0) == []
    dispatcher.check_integrity()
    dispatcher.worker_ready(2, make_capacity())
    commands = dispatcher.poll(1.0)
    assert added(commands) == [5, 4, 3]
    replayed = commands[1]
    assert isinstance(replayed, Add)
    assert replayed.worker_id == 2
    outputs = [fake_token(4, index).token_id for index in range(2)]
    assert replayed.sequence.token_ids == [7] * 16 + outputs
    assert replayed.sequence.num_prompt_tokens == 16
    assert give(dispatcher, token(4, 2), worker_id=2) == [Delivery(4, fake_token(4, 2))]


def test_late_outputs_of_the_dead_worker_are_dropped() -> None:
    dispatcher = make_ready()
    add(dispatcher, 0)
    dispatcher.poll(0.0)
    dispatcher.worker_dead(WORKER, 1.0)
    assert give(dispatcher, token(0, 0)) == []
    dispatcher.worker_ready(2, make_capacity())
    dispatcher.poll(1.0)
    assert give(dispatcher, token(0, 0)) == []
    assert give(dispatcher, token(0, 0), worker_id=2) == [Delivery(0, fake_token(0, 0))]


def test_two_workers_lost_one_after_the_other_keep_arrival_order() -> None:
    dispatcher = make_ready()
    dispatcher.worker_ready(2, make_capacity())
    add(dispatcher, *range(6), num_prompt=64)
    dispatcher.poll(0.0)
    dispatcher.worker_dead(2, 1.0)
    dispatcher.worker_dead(WORKER, 1.0)
    dispatcher.worker_ready(3, make_capacity())
    assert added(dispatcher.poll(1.0)) == list(range(6))


def test_abort_between_death_and_replay() -> None:
    dispatcher = make_ready()
    add(dispatcher, 0, 1)
    dispatcher.poll(0.0)
    dispatcher.worker_dead(WORKER, 1.0)
    assert dispatcher.abort(0) == []
    dispatcher.worker_ready(2, make_capacity())
    assert added(dispatcher.poll(1.0)) == [1]


def test_gives_up_after_max_replays() -> None:
    dispatcher = make_dispatcher(max_replays=3)
    add(dispatcher, 0)
    for worker_id in range(3):
        dispatcher.worker_ready(worker_id, make_capacity())
        assert added(dispatcher.poll(0.0)) == [0]
        assert dispatcher.worker_dead(worker_id, 0.0) == []
    dispatcher.worker_ready(3, make_capacity())
    assert added(dispatcher.poll(0.0)) == [0]
    (delivery,) = dispatcher.worker_dead(3, 0.0)
    assert delivery.finish_reason is FinishReason.ERROR
    assert delivery.error is not None
    assert delivery.error.status == 500
    assert dispatcher.num_live == 0


def test_without_replays_a_death_is_the_end() -> None:
    dispatcher = make_ready(max_replays=0)
    add(dispatcher, 0, 1)
    dispatcher.poll(0.0)
    assert [d.seq_id for d in dispatcher.worker_dead(WORKER, 0.0)] == [0, 1]


def test_progress_between_deaths_clears_the_count() -> None:
    dispatcher = make_dispatcher(max_replays=1)
    add(dispatcher, 0)
    for worker_id in range(10):
        dispatcher.worker_ready(worker_id, make_capacity())
        assert added(dispatcher.poll(0.0)) == [0]
        assert give(dispatcher, token(0, worker_id), worker_id=worker_id)
        assert dispatcher.worker_dead(worker_id, 0.0) == []


def test_suspects_are_handed_over_one_by_one_until_proven() -> None:
    dispatcher = make_dispatcher()
    add(dispatcher, 0, 1, 2)
    for worker_id in range(2):
        dispatcher.worker_ready(worker_id, make_capacity())
        assert added(dispatcher.poll(0.0)) == [0, 1, 2]
        dispatcher.worker_dead(worker_id, 0.0)
    add(dispatcher, 3)
    dispatcher.worker_ready(2, make_capacity())
    assert added(dispatcher.poll(0.0)) == [0]
    assert dispatcher.poll(0.0) == []
    give(dispatcher, token(0, 0), worker_id=2)
    assert added(dispatcher.poll(0.0)) == [1]
    assert dispatcher.abort(1) == [Abort(2, 1)]  # a suspect that leaves makes way too
    assert added(dispatcher.poll(0.0)) == [2]
    give(dispatcher, token(2, 0), worker_id=2)
    assert added(dispatcher.poll(0.0)) == [3]
