"""What became of each tier's requests: counted in the dispatcher, shown by the metrics."""

import fake_pb_utils as pb_utils
import pytest
from builders import fake_token, make_sampling
from service_runs import until

from shoal.backend.messages import CacheStatus
from shoal.backend.metrics import MetricsPublisher, ServiceCounts
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.tier_counts import TierCounts
from shoal.scheduler.tiers import Tier, TierTable
from shoal.scheduler.worker_ledger import WorkerCapacity

TIERS = TierTable([Tier("quick", 8.0, ttft_ms=500, tpot_ms=100), Tier("slow", 1.0)], "slow")


def make_dispatcher(max_queued_requests: int = 10) -> Dispatcher:
    dispatcher = Dispatcher(DispatcherConfig(max_queued_requests, policy="priority", tiers=TIERS))
    dispatcher.worker_ready(1, WorkerCapacity(100, 16, 2, 1000))
    return dispatcher


def add(
    dispatcher: Dispatcher, seq_id: int, slo_class: str, now: float = 0.0, **more: float
) -> None:
    dispatcher.add(seq_id, [7] * 16, make_sampling(max_tokens=8), now, slo_class=slo_class, **more)


def give(dispatcher: Dispatcher, seq_id: int, times: list[float]) -> None:
    for index, now in enumerate(times):
        reason = FinishReason.LENGTH if index == len(times) - 1 else None
        output = StepOutput(seq_id, index, fake_token(seq_id, index), reason)
        dispatcher.outputs(1, [output], now)


def test_targets_are_counted_where_a_tier_has_some() -> None:
    dispatcher = make_dispatcher()
    for seq_id, slo_class, times in (
        (0, "quick", [0.4, 0.49, 0.58]),  # both kept
        (1, "quick", [0.6, 0.9, 1.2]),  # both missed
        (2, "quick", [0.3]),  # one token has no time per token
        (3, "slow", [9.0, 10.0]),
    ):
        add(dispatcher, seq_id, slo_class)
        dispatcher.poll(0.0)
        give(dispatcher, seq_id, times)
    quick, slow = dispatcher.counts["quick"], dispatcher.counts["slow"]
    assert (quick.ttft_met, quick.ttft_missed) == (2, 1)
    assert (quick.tpot_met, quick.tpot_missed) == (1, 1)
    assert slow == TierCounts()


def test_ends_and_refusals_are_counted_by_tier() -> None:
    dispatcher = make_dispatcher(2)
    add(dispatcher, 0, "slow")
    dispatcher.poll(0.0)
    dispatcher.worker_dead(1, 0.1)  # queued again: it is not shed
    add(dispatcher, 1, "slow", timeout_s=5.0)
    add(dispatcher, 2, "quick")  # sheds 1
    with pytest.raises(RequestError):
        add(dispatcher, 3, "slow")
    add_late = {"timeout_s": 1.0, "arrival": -2.0}
    with pytest.raises(RequestError):
        add(dispatcher, 4, "quick", **add_late)
    dispatcher.note_refused(TIERS.get("quick"), "deadline_unmeetable", was_full=False, now=0.0)
    counts = dispatcher.counts
    assert (counts["slow"].shed, counts["slow"].replayed) == (1, 1)
    assert counts["slow"].refused == {"queue_full": 1}
    assert counts["quick"].refused == {"timeout": 1, "deadline_unmeetable": 1}
    assert counts["quick"].timed_out == 1


def test_a_copy_does_not_change() -> None:
    dispatcher = make_dispatcher()
    before = dispatcher.counts
    dispatcher.note_refused(TIERS.get("slow"), "queue_full", was_full=True, now=0.0)
    assert before["slow"].refused == {}


def test_metrics_carry_tier_and_reason() -> None:
    tiers = {"quick": TierCounts(shed=2, ttft_met=5), "slow": TierCounts()}
    tiers["slow"].refused["queue_full"] = 3
    cache = CacheStatus(cached_blocks=4, num_query_tokens=100, num_hit_tokens=60)
    counts = ServiceCounts(tiers=tiers, cache=cache)
    publisher = MetricsPublisher(pb_utils, {"model": "m"}, lambda: counts, interval_s=3600)
    until(lambda: "shoal_tpot_target_total" in publisher._families)
    publisher.close()
    metrics = publisher._metrics
    refused = metrics["shoal_requests_refused_total.slow.queue_full"]
    assert refused.value() == 3
    assert refused.labels == {"model": "m", "tier": "slow", "reason": "queue_full"}
    assert metrics["shoal_requests_shed_total.quick"].value() == 2
    met = metrics["shoal_ttft_target_total.quick.met"]
    assert (met.value(), met.labels["result"]) == (5, "met")
    assert metrics["shoal_prefix_hit_tokens_total"].value() == 60
    assert "shoal_requests_shed_total.slow" not in metrics  # nothing to say


def test_totals_outlive_a_worker() -> None:
    before = CacheStatus(cached_blocks=9, num_query_tokens=10, num_hit_tokens=4)
    now = CacheStatus(cached_blocks=2, num_query_tokens=5, num_hit_tokens=5, num_evicted_blocks=1)
    assert now.with_totals_of(before) == CacheStatus(2, 15, 9, 1)
