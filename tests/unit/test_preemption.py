"""A head of a higher tier takes the place of running sequences of lower ones, within bounds."""

import random
from typing import Any

import pytest
from builders import fake_token, make_sampling
from virtual_service import Request, VirtualService, percentile

from shoal.scheduler.dispatched import Abort, Add, Command, Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.preemption import PreemptionConfig
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.tiers import Tier, TierTable
from shoal.scheduler.worker_ledger import WorkerCapacity

TIERS = TierTable([Tier("high", 8.0), Tier("standard", 2.0), Tier("low", 1.0)])
WORKER = 1


def make_dispatcher(
    max_num_seqs: int = 2,
    num_blocks: int = 100,
    max_preemptions: int = 2,
    policy: str = "priority",
) -> Dispatcher:
    config = DispatcherConfig(
        100,
        policy=policy,
        tiers=TIERS,
        preemption=PreemptionConfig(max_preemptions, min_run_s=1.0),
    )
    dispatcher = Dispatcher(config)
    dispatcher.worker_ready(WORKER, WorkerCapacity(num_blocks, 16, max_num_seqs, 16 * num_blocks))
    return dispatcher


def add(dispatcher: Dispatcher, seq_id: int, slo_class: str, now: float, prompt: int = 16) -> None:
    sampling = make_sampling(max_tokens=500)
    dispatcher.add(seq_id, [7] * prompt, sampling, now, slo_class=slo_class)


def poll(dispatcher: Dispatcher, now: float) -> list[tuple[str, int]]:
    commands = dispatcher.poll(now)
    dispatcher.check_integrity()
    return [named(command) for command in commands]


def named(command: Command) -> tuple[str, int]:
    if isinstance(command, Add):
        return "add", command.sequence.seq_id
    return "abort", command.seq_id


def give(dispatcher: Dispatcher, seq_id: int, *indices: int, **options: Any) -> list[Delivery]:
    reason = options.pop("reason", None)
    outputs = [StepOutput(seq_id, i, fake_token(seq_id, i)) for i in indices]
    if reason is not None:
        outputs[-1] = StepOutput(seq_id, indices[-1], fake_token(seq_id, indices[-1]), reason)
    deliveries = dispatcher.outputs(WORKER, outputs, options.pop("now", 1.0))
    dispatcher.check_integrity()
    return deliveries


def test_the_lowest_and_cheapest_makes_way_and_comes_back_in_its_place() -> None:
    dispatcher = make_dispatcher(max_num_seqs=3)
    add(dispatcher, 0, "standard", 0.0)
    add(dispatcher, 1, "low", 0.0, prompt=64)
    add(dispatcher, 2, "low", 0.0, prompt=32)
    poll(dispatcher, 0.0)
    give(dispatcher, 2, 0, 1)
    add(dispatcher, 3, "low", 1.0)
    add(dispatcher, 4, "high", 1.0)
    assert poll(dispatcher, 1.5) == [("abort", 2), ("add", 4)]
    give(dispatcher, 4, 0, reason=FinishReason.STOP)
    (command,) = dispatcher.poll(1.6)
    assert isinstance(command, Add)
    assert command.sequence.seq_id == 2  # before 3, which came later
    outputs = [fake_token(2, index).token_id for index in range(2)]
    assert command.sequence.token_ids == [7] * 32 + outputs
    assert dispatcher.num_preempted == 1


def test_blocks_may_take_several_victims() -> None:
    dispatcher = make_dispatcher(max_num_seqs=8, num_blocks=10)
    for seq_id in range(3):
        add(dispatcher, seq_id, "low", 0.0, prompt=40)  # 3 blocks each
    poll(dispatcher, 0.0)
    add(dispatcher, 3, "high", 1.0, prompt=100)  # 7 blocks
    commands = poll(dispatcher, 1.5)
    assert sorted(commands[:-1]) == [("abort", 1), ("abort", 2)]
    assert commands[-1] == ("add", 3)


def test_none_makes_way_in_vain() -> None:
    dispatcher = make_dispatcher(max_num_seqs=8, num_blocks=10)
    add(dispatcher, 0, "high", 0.0, prompt=100)
    add(dispatcher, 1, "low", 0.0)
    poll(dispatcher, 0.0)
    add(dispatcher, 2, "high", 1.0, prompt=100)
    assert poll(dispatcher, 5.0) == []


def test_a_tier_does_not_preempt_itself_or_a_higher_one() -> None:
    dispatcher = make_dispatcher(max_num_seqs=1)
    add(dispatcher, 0, "standard", 0.0)
    poll(dispatcher, 0.0)
    add(dispatcher, 1, "standard", 0.0)
    add(dispatcher, 2, "low", 0.0)
    assert poll(dispatcher, 50.0) == []


def test_a_minimum_run_is_left_to_each() -> None:
    dispatcher = make_dispatcher(max_num_seqs=1)
    add(dispatcher, 0, "low", 0.0)
    poll(dispatcher, 0.0)
    add(dispatcher, 1, "high", 0.1)
    assert poll(dispatcher, 0.9) == []
    assert poll(dispatcher, 1.0) == [("abort", 0), ("add", 1)]


def test_each_makes_way_a_bounded_number_of_times() -> None:
    dispatcher = make_dispatcher(max_num_seqs=1)
    add(dispatcher, 0, "low", 0.0)
    poll(dispatcher, 0.0)
    now = 0.0
    for high in range(1, 3):
        now += 10.0
        add(dispatcher, high, "high", now)
        assert poll(dispatcher, now) == [("abort", 0), ("add", high)]
        give(dispatcher, high, 0, reason=FinishReason.STOP)
        assert poll(dispatcher, now) == [("add", 0)]
    add(dispatcher, 3, "high", now + 10.0)
    assert poll(dispatcher, now + 10.0) == []
    assert dispatcher.num_preempted == 2


def test_each_time_lifts_its_rank() -> None:
    dispatcher = make_dispatcher(max_num_seqs=1, max_preemptions=5)
    add(dispatcher, 0, "low", 0.0)
    poll(dispatcher, 0.0)
    add(dispatcher, 1, "standard", 2.0)
    assert poll(dispatcher, 2.0) == [("abort", 0), ("add", 1)]
    give(dispatcher, 1, 0, reason=FinishReason.STOP)
    assert poll(dispatcher, 2.1) == [("add", 0)]
    add(dispatcher, 2, "standard", 9.0)  # no more than its equal now
    assert poll(dispatcher, 9.0) == []
    add(dispatcher, 3, "high", 9.0)
    assert poll(dispatcher, 9.0) == [("abort", 0), ("add", 3)]


@pytest.mark.parametrize(("policy", "max_preemptions"), [("fcfs", 2), ("priority", 0)])
def test_it_can_be_off(policy: str, max_preemptions: int) -> None:
    dispatcher = make_dispatcher(1, policy=policy, max_preemptions=max_preemptions)
    add(dispatcher, 0, "low", 0.0)
    poll(dispatcher, 0.0)
    add(dispatcher, 1, "high", 1.0)
    assert poll(dispatcher, 50.0) == []


class TestWordsOnTheirWay:
    """The worker was yet to read the abort when it sent these."""

    def preempted(self) -> Dispatcher:
        dispatcher = make_dispatcher(max_num_seqs=1)
        add(dispatcher, 0, "low", 0.0)
        poll(dispatcher, 0.0)
        give(dispatcher, 0, 0)
        add(dispatcher, 1, "high", 1.0)
        assert poll(dispatcher, 1.0) == [("abort", 0), ("add", 1)]
        return dispatcher

    def test_tokens_are_taken_while_it_is_queued(self) -> None:
        dispatcher = self.preempted()
        assert give(dispatcher, 0, 1, 2) == [
            Delivery(0, fake_token(0, 1)),
            Delivery(0, fake_token(0, 2)),
        ]
        give(dispatcher, 1, 0, reason=FinishReason.STOP)
        (command,) = dispatcher.poll(1.1)
        assert isinstance(command, Add)
        assert command.sequence.num_output_tokens == 3

    def test_tokens_are_taken_once_after_it_went_back(self) -> None:
        dispatcher = self.preempted()
        give(dispatcher, 1, 0, reason=FinishReason.STOP)
        assert poll(dispatcher, 1.1) == [("add", 0)]
        assert len(give(dispatcher, 0, 1)) == 1  # of its first run
        assert give(dispatcher, 0, 1) == []  # of its second
        assert give(dispatcher, 0, 2) == [Delivery(0, fake_token(0, 2))]

    def test_an_end_is_the_end(self) -> None:
        dispatcher = self.preempted()
        (delivery,) = give(dispatcher, 0, 1, reason=FinishReason.STOP)
        assert delivery.finish_reason is FinishReason.STOP
        give(dispatcher, 1, 0, reason=FinishReason.STOP)
        assert poll(dispatcher, 1.1) == []
        assert dispatcher.num_live == 0

    def test_an_end_after_it_went_back_is_told_to_the_worker(self) -> None:
        dispatcher = self.preempted()
        give(dispatcher, 1, 0, reason=FinishReason.STOP)
        assert poll(dispatcher, 1.1) == [("add", 0)]
        give(dispatcher, 0, 1, reason=FinishReason.STOP)
        assert dispatcher.poll(1.2) == [Abort(WORKER, 0)]

    def test_nothing_comes_of_a_dead_worker(self) -> None:
        dispatcher = self.preempted()
        assert dispatcher.worker_dead(WORKER, 1.0) == []
        assert give(dispatcher, 0, 1) == []
        dispatcher.worker_ready(2, WorkerCapacity(100, 16, 2, 1600))
        assert [command.worker_id for command in dispatcher.poll(1.0)] == [2, 2]


@pytest.mark.parametrize("policy", ["priority", "wfq"])
def test_it_makes_a_high_tier_quicker_and_nobody_loses_a_token(policy: str) -> None:
    def run(max_preemptions: int) -> VirtualService:
        config = DispatcherConfig(
            10_000,
            policy=policy,
            tiers=TIERS,
            preemption=PreemptionConfig(max_preemptions, min_run_s=0.5),
        )
        service = VirtualService(Dispatcher(config), max_num_seqs=4)
        rng = random.Random(7)
        for _ in range(60):
            service.ask(Request(0.0, 64, 200, slo_class="low"))
        for index in range(20):
            at = 2.0 + 3.0 * index + rng.random()
            service.ask(Request(at, 64, 8, slo_class="high"))
        service.run(until=1000.0)
        for request in service.requests:
            assert request.error is None
            assert len(request.token_times) == request.num_outputs
        return service

    def high_p50(service: VirtualService) -> float:
        return percentile([r.ttft for r in service.served(slo_class="high")], 0.5)

    without, with_it = run(0), run(2)
    assert without.dispatcher.num_preempted == 0
    assert 0 < with_it.dispatcher.num_preempted <= 20
    assert high_p50(with_it) < high_p50(without) / 3
    # The recompute it costs is small beside the work: the whole takes hardly longer.
    assert with_it.now < 1.05 * without.now
