"""The simulator: virtual times, conservation, determinism, measures and reports."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulations import CONFIG, make_options, make_request, simulate
from typer.testing import CliRunner

from shoal.load.measures import summarize
from shoal.load.records import Outcome, RequestRecord, SimulationResult
from shoal.load.report import ReportContext, write_report
from shoal.load.service_meter import PauseMeter, ServiceMeter, jain_index
from shoal.load.simulate import app
from shoal.load.simulation import (
    Latencies,
    Simulation,
    SimulationConfig,
    WorkerSettings,
    default_dispatcher,
)
from shoal.load.step_cost import StepCost
from shoal.load.virtual_time import EventLoop
from shoal.load.workload import Tier, Workload, segment_tokens
from shoal.load.workloads import WORKLOADS
from shoal.scheduler.dispatched import Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sampling_params import SamplingParams

TRACES = {"azure", "mooncake"}


def facts(result: SimulationResult) -> list[tuple[object, ...]]:
    """All that is known of each request."""
    return [
        tuple(getattr(record, name) for name in RequestRecord.__slots__)
        for record in result.records
    ]


def test_events_run_in_order_of_time_then_of_asking() -> None:
    loop = EventLoop()
    seen: list[tuple[float, str]] = []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        loop.at(time, lambda name: seen.append((loop.now, name)), name)
    loop.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_three_requests_have_the_times_computed_by_hand() -> None:
    # All numbers are binary fractions, so that the sums are exact.
    config = SimulationConfig(
        cost=StepCost(base=1.0, per_prefill_token=1 / 8, per_decode_seq=1 / 16),
        latencies=Latencies(intake=0.5, to_worker=0.25, from_worker=0.25, to_client=0.125),
    )
    requests = [
        make_request(0.0, num_prompt_tokens=8, num_output_tokens=2),
        make_request(0.25, num_prompt_tokens=4, num_output_tokens=1),
        make_request(100.0, num_prompt_tokens=16, num_output_tokens=3),
    ]
    result = simulate(Workload("three", "", requests), config)
    first, second, third = result.records
    # Step 1 runs [0.75, 2.75]: 8 prefill tokens. The second request reaches the worker at 1.0,
    # waits for step 2, [2.75, 4.3125]: one decode and 4 prefill tokens. Both end with it.
    assert (first.handed_over, first.first_token, first.ended) == (0.5, 3.125, 4.6875)
    assert (second.handed_over, second.first_token, second.ended) == (0.75, 4.6875, 4.6875)
    # Steps of 3 s (16 prefill tokens), then two of 1.0625 s, from 100.75 on.
    assert (third.first_token, third.ended) == (104.125, 106.25)
    assert third.tpot == 1.0625
    assert result.busy_s == [2.0 + 1.5625 + 3.0 + 2 * 1.0625]
    assert result.num_steps == 5
    assert result.num_scheduled == 1 + 2 + 3


def test_two_workers_share_the_requests() -> None:
    requests = [make_request(0.0, 16, 50, name=str(i)) for i in range(8)]
    result = simulate(Workload("even", "", requests), replace(CONFIG, num_workers=2))
    assert result.busy_s[0] == pytest.approx(result.busy_s[1], rel=0.1)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    runs = [
        facts(simulate(WORKLOADS[name](make_options(seed=seed, num_requests=60))))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    # A trace has no seed: its times and lengths are those of the real requests.
    assert (runs[0] == runs[2]) == (name in TRACES)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, max_queued_requests=3),
        replace(CONFIG, max_queued_requests=3, max_retries=2),
        replace(CONFIG, worker=WorkerSettings(num_blocks=130, max_model_len=2048), num_workers=2),
    ],
    ids=["roomy", "small queue", "retries", "small pool"],
)
@pytest.mark.parametrize("name", ["overload", "chat", "long_documents", "two_tenants"])
def test_every_request_ends_once(name: str, config: SimulationConfig) -> None:
    workload = WORKLOADS[name](make_options(config, seed=3, num_requests=200, load=3.0))
    for request in workload.requests[::7]:
        request.patience_s = 1.0
    num_requests = workload.num_requests
    simulation = Simulation(workload, config)
    result = simulation.run()
    assert [record.seq_id for record in result.records] == list(range(num_requests))
    for record in result.records:
        assert record.outcome is not None
        assert record.ended is not None
        assert record.ended >= record.arrival
        if record.outcome is Outcome.FINISHED:
            assert record.num_delivered == record.num_output_tokens
            assert record.arrival < record.accepted <= record.handed_over < record.first_token
            assert record.first_token <= record.ended
        else:
            assert record.num_delivered < record.num_output_tokens
    for worker in simulation.workers:
        worker.scheduler.check_integrity()
    assert sum(summarize(result).overall.outcomes.values()) == num_requests


def test_every_outcome_can_happen() -> None:
    config = replace(CONFIG, max_queued_requests=1, worker=WorkerSettings(max_num_seqs=1))
    chat = make_request(0.02, 8, 2, name="turn 1")
    chat.follow_up = make_request(1.0, 8, 2, name="turn 2")
    hasty = make_request(0.01, 8, 2, name="hasty")
    hasty.patience_s = 0.5
    long = make_request(0.0, 8, 200, name="long")
    result = simulate(Workload("outcomes", "", [long, hasty, chat]), config)
    assert [record.outcome for record in result.records] == [
        Outcome.FINISHED,
        Outcome.CANCELLED,
        Outcome.REFUSED,
        Outcome.NOT_SENT,
    ]
    refused = result.records[2]
    assert refused.retry_after_s is not None
    # The hasty one left the only place in the queue when its patience ended.
    assert refused.would_be_accepted == pytest.approx(0.51)
    assert summarize(result).retry_after.num_told == 1


def test_a_refused_client_comes_back_after_its_retry_after() -> None:
    config = replace(
        CONFIG, max_queued_requests=1, max_retries=50, worker=WorkerSettings(max_num_seqs=1)
    )
    requests = [make_request(i / 100, 8, 100, name=str(i)) for i in range(3)]
    result = simulate(Workload("retry", "", requests), config)
    assert {record.outcome for record in result.records} == {Outcome.FINISHED}
    late = result.records[2]
    assert late.num_refusals >= 1
    assert late.accepted >= late.refused + late.retry_after_s
    # The place came free when the second of them went to the worker.
    assert late.would_be_accepted == result.records[1].handed_over


def test_a_follow_up_quotes_the_answer_and_waits_for_it() -> None:
    workload = WORKLOADS["chat"](make_options(seed=5, num_requests=40))
    opening = next(request for request in workload.requests if request.follow_up)
    following = opening.follow_up
    quoted = opening.prompt_tokens() + list(segment_tokens(opening.answer))
    assert following.prompt_tokens()[: len(quoted)] == quoted
    opening.arrival = 0.0
    following.follow_up = None
    first, second = simulate(Workload("chat", "", [opening])).records
    assert second.arrival == first.ended + following.arrival


def test_tenant_and_tier_reach_a_dispatcher_that_takes_them() -> None:
    taken: list[tuple[str, str]] = []

    class TenantDispatcher(Dispatcher):
        def add(
            self,
            seq_id: int,
            prompt_token_ids: list[int],
            sampling: SamplingParams,
            now: float,
            *,
            tenant: str = "",
            slo_class: str = "",
        ) -> None:
            taken.append((tenant, slo_class))
            super().add(seq_id, prompt_token_ids, sampling, now)

    request = make_request(0.0, 8, 2)
    request.tenant, request.slo_class = "acme", "batch"
    Simulation(
        Workload("tenant", "", [request]),
        CONFIG,
        make_dispatcher=lambda: TenantDispatcher(DispatcherConfig(max_queued_requests=8)),
    ).run()
    assert taken == [("acme", "batch")]


class ImpatientDispatcher(Dispatcher):
    """Ends what was queued for 0.2 s."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(DispatcherConfig(max_queued_requests=8))
        self._error = error

    def expire(self, now: float) -> list[Delivery]:
        late = [
            s for s in self._sequences.values() if s.worker_id is None and now > s.arrival + 0.2
        ]
        return [self._fail(sequence, self._error) for sequence in late]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestError("Too late.", code="timeout", status=504), Outcome.FAILED),
        (RequestError("Shed.", code="shed", status=429, retry_after_ms=100), Outcome.REFUSED),
    ],
)
def test_what_a_dispatcher_ends_in_its_queue(error: RequestError, outcome: Outcome) -> None:
    config = replace(CONFIG, worker=WorkerSettings(max_num_seqs=1))
    requests = [make_request(0.0, 8, 100, name="long"), make_request(0.0, 8, 1, name="short")]
    simulation = Simulation(
        Workload("expire", "", requests),
        config,
        make_dispatcher=lambda: ImpatientDispatcher(error),
    )
    long, short = simulation.run().records
    assert long.outcome is Outcome.FINISHED
    assert (short.outcome, short.refusal_code) == (outcome, error.code)
    # The dispatcher is asked at least every 50 ms while something is queued.
    assert 0.2 < short.ended - short.arrival < 0.26


def test_a_client_that_was_shed_may_come_back_and_then_lose_patience() -> None:
    config = replace(CONFIG, worker=WorkerSettings(max_num_seqs=1), max_retries=100)
    error = RequestError("Shed.", code="shed", status=429, retry_after_ms=100)
    requests = [make_request(0.0, 8, 100, name=str(number)) for number in range(2)]
    requests[1].patience_s = 0.3  # while it waits to come back for the first time
    simulation = Simulation(
        Workload("shed", "", requests),
        config,
        make_dispatcher=lambda: ImpatientDispatcher(error),
    )
    _, hasty = simulation.run().records
    assert (hasty.outcome, hasty.num_refusals) == (Outcome.CANCELLED, 1)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy"):
        default_dispatcher(replace(CONFIG, policy="no-such-policy"), Workload("none", "", []))


def test_goodput_counts_requests_within_their_tiers_targets() -> None:
    quick, slow = make_request(0.0, 8, 2, name="quick"), make_request(0.0, 8, 2, name="slow")
    quick.slo_class, slow.slo_class = "easy", "hard"
    tiers = {"easy": Tier(ttft_ms=1000, tpot_ms=1000), "hard": Tier(ttft_ms=1, tpot_ms=1000)}
    summary = summarize(simulate(Workload("tiers", "", [quick, slow], tiers=tiers)))
    assert {group.name: group.goodput for group in summary.tiers} == {"easy": 1.0, "hard": 0.0}
    assert summary.overall.goodput == 0.5


def test_service_counts_only_while_every_tenant_waits() -> None:
    meter = ServiceMeter(["a", "b"])
    meter.waits("a", 1.0)
    meter.decoded("a")
    meter.waits("b", 2.0)
    meter.prefilled("a", 10)
    meter.decoded("b")
    meter.stops_waiting("a", 5.0)
    meter.decoded("b")
    assert meter.contended == {"a": 10.0, "b": 2.0}
    assert meter.contended_s == 3.0


def test_jain_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == 1.0
    assert jain_index([1.0, 0.0]) == 0.5
    assert jain_index([0.0, 0.0]) is None


def test_a_report_holds_the_command_the_tables_and_the_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = simulate(WORKLOADS["sla_tiers"](make_options(num_requests=60)))
    context = ReportContext("A title", "python load/simulate.py run x", [("seed", "0")])
    written = write_report(tmp_path / "new" / "x.md", result, summarize(result), context)
    text = written[0].read_text(encoding="utf-8")
    assert text.startswith("# A title\n")
    for expected in (context.command, "| seed | 0 |", "tier interactive", "x-latency.png"):
        assert expected in text
    for plot in written[1:]:
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_the_tables() -> None:
    shown = CliRunner().invoke(app, ["run", "overload", "--requests", "300", "--seed", "1"])
    assert shown.exit_code == 0
    assert "goodput" in shown.stdout
    assert "time in steps" in shown.stdout
    unknown = CliRunner().invoke(app, ["run", "nonsense"])
    assert unknown.exit_code == 1


def test_a_tiers_longest_pause_is_between_tokens_of_any_of_its_requests() -> None:
    meter = PauseMeter(end=10.0)
    meter.arrives("low", 1.0)
    meter.arrives("high", 0.0)
    for at in (2.0, 2.5, 6.0, 30.0):
        meter.token("low", at)
    assert meter.longest == {"low": 4.0, "high": 10.0}
    meter.token("high", 9.0)
    assert meter.longest["high"] == 9.0
