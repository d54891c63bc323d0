"""What the dispatcher refuses, sheds and times out, and when it says to retry."""

import random
from typing import Any

import pytest
from builders import fake_token, make_sampling
from virtual_service import Request, VirtualService, percentile

from shoal.scheduler.dispatched import Abort, Add, Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.drain import DrainEstimate, DrainMeter
from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.tiers import TenantSettings, TenantTable, Tier, TierTable
from shoal.scheduler.worker_ledger import WorkerCapacity

TIERS = TierTable([Tier("high", 8.0), Tier("standard", 2.0), Tier("low", 1.0)])


def make_dispatcher(max_queued_requests: int = 100, **config: Any) -> Dispatcher:
    return Dispatcher(DispatcherConfig(max_queued_requests, tiers=TIERS, **config))


def add(
    dispatcher: Dispatcher, seq_id: int, num_prompt: int = 16, now: float = 0.0, **options: Any
) -> list[Delivery]:
    max_tokens = options.pop("max_tokens", 8)
    sampling = make_sampling(max_tokens=max_tokens)
    deliveries = dispatcher.add(seq_id, [7] * num_prompt, sampling, now, **options)
    dispatcher.check_integrity()
    return deliveries


def refused(dispatcher: Dispatcher, seq_id: int, *args: Any, **options: Any) -> RequestError:
    before = dispatcher.live_seq_ids
    with pytest.raises(RequestError) as error:
        add(dispatcher, seq_id, *args, **options)
    assert dispatcher.live_seq_ids == before
    dispatcher.check_integrity()
    return error.value


def ends(deliveries: list[Delivery]) -> list[tuple[int, str]]:
    assert all(d.finish_reason is FinishReason.ERROR for d in deliveries)
    return [(d.seq_id, d.error.code if d.error else "") for d in deliveries]


def with_worker(dispatcher: Dispatcher, max_num_seqs: int = 1) -> Dispatcher:
    dispatcher.worker_ready(1, WorkerCapacity(1000, 16, max_num_seqs, 16_000))
    return dispatcher


class TestShedding:
    def test_the_newest_of_the_lowest_tier_makes_way(self) -> None:
        dispatcher = make_dispatcher(4)
        for seq_id, slo_class in enumerate(["low", "standard", "low", "standard"]):
            add(dispatcher, seq_id, slo_class=slo_class)
        shed = add(dispatcher, 4, slo_class="high")
        assert ends(shed) == [(2, "shed")]
        assert shed[0].error is not None
        assert shed[0].error.status == 429
        assert shed[0].error.retry_after_ms is not None
        assert ends(add(dispatcher, 5, slo_class="high")) == [(0, "shed")]
        assert ends(add(dispatcher, 6, slo_class="high")) == [(3, "shed")]
        assert dispatcher.num_shed == 3

    def test_its_own_tier_and_higher_ones_are_not_shed(self) -> None:
        dispatcher = make_dispatcher(2)
        add(dispatcher, 0, slo_class="standard")
        add(dispatcher, 1, slo_class="high")
        assert refused(dispatcher, 2, slo_class="standard").code == "queue_full"
        assert refused(dispatcher, 3, slo_class="low").code == "queue_full"

    def test_what_was_in_service_is_not_shed(self) -> None:
        dispatcher = with_worker(make_dispatcher(1))
        add(dispatcher, 0, slo_class="low")
        dispatcher.poll(0.0)
        dispatcher.outputs(1, [StepOutput(0, 0, fake_token(0, 0))], 0.1)
        dispatcher.worker_dead(1, 0.2)
        assert refused(dispatcher, 1, slo_class="high").code == "queue_full"

    def test_by_tokens_too(self) -> None:
        dispatcher = make_dispatcher(max_queued_tokens=100)
        for seq_id in range(3):
            add(dispatcher, seq_id, 30, slo_class="low")
        error = refused(dispatcher, 3, 30, slo_class="low")
        assert (error.status, error.code) == (429, "queue_full")
        assert "100 tokens" in error.message
        assert ends(add(dispatcher, 4, 60)) == [(2, "shed"), (1, "shed")]
        # Not even all of the low tier would make room: none is shed in vain.
        assert refused(dispatcher, 5, 60).code == "queue_full"
        assert dispatcher.num_queued == 2

    def test_an_empty_queue_takes_one_of_any_size(self) -> None:
        dispatcher = make_dispatcher(max_queued_tokens=100)
        add(dispatcher, 0, 500)
        assert refused(dispatcher, 1, 1).code == "queue_full"


class TestTimeouts:
    def test_a_queued_one_ends_in_time(self) -> None:
        dispatcher = make_dispatcher()
        add(dispatcher, 0, timeout_s=2.0)
        add(dispatcher, 1, timeout_s=1.0)
        add(dispatcher, 2)
        assert dispatcher.expire(0.99) == []
        (delivery,) = dispatcher.expire(1.0)
        assert (delivery.seq_id, delivery.finish_reason) == (1, FinishReason.ERROR)
        assert delivery.error is not None
        assert (delivery.error.status, delivery.error.code) == (408, "timeout")
        assert delivery.error.param == "timeout"
        assert "1000 ms" in delivery.error.message
        dispatcher.check_integrity()
        assert ends(dispatcher.expire(5.0)) == [(0, "timeout")]
        assert dispatcher.live_seq_ids == (2,)

    def test_on_a_worker_it_frees_its_place_at_once(self) -> None:
        dispatcher = with_worker(make_dispatcher())
        add(dispatcher, 0, timeout_s=1.0)
        add(dispatcher, 1)
        dispatcher.poll(0.0)
        assert ends(dispatcher.expire(1.5)) == [(0, "timeout")]
        commands = dispatcher.poll(1.5)
        assert commands[0] == Abort(1, 0)
        assert isinstance(commands[1], Add)
        assert commands[1].sequence.seq_id == 1

    def test_it_counts_from_arrival(self) -> None:
        dispatcher = make_dispatcher()
        add(dispatcher, 0, now=10.0, timeout_s=1.0, arrival=9.5)
        assert ends(dispatcher.expire(10.5)) == [(0, "timeout")]
        error = refused(dispatcher, 1, now=12.0, timeout_s=1.0, arrival=11.0)
        assert (error.status, error.code) == (408, "timeout")

    def test_a_replay_does_not_start_it_again(self) -> None:
        dispatcher = with_worker(make_dispatcher())
        add(dispatcher, 0, timeout_s=10.0)
        for worker_id, now in ((1, 0.0), (2, 4.0), (3, 8.0)):
            dispatcher.poll(now)
            dispatcher.worker_dead(worker_id, now + 1.0)
            dispatcher.worker_ready(worker_id + 1, WorkerCapacity(1000, 16, 1, 16_000))
        dispatcher.poll(9.5)
        assert dispatcher.expire(9.9) == []
        assert ends(dispatcher.expire(10.0)) == [(0, "timeout")]

    def test_what_ended_does_not_time_out(self) -> None:
        dispatcher = with_worker(make_dispatcher(), 2)
        add(dispatcher, 0, timeout_s=1.0)
        add(dispatcher, 1, timeout_s=1.0)
        dispatcher.poll(0.0)
        dispatcher.outputs(1, [StepOutput(0, 0, fake_token(0, 0), FinishReason.STOP)], 0.5)
        dispatcher.abort(1)
        assert dispatcher.expire(2.0) == []


class TestTenantLimits:
    def test_requests_at_a_time(self) -> None:
        tenants = TenantTable({"*": TenantSettings(max_requests=2)})
        dispatcher = with_worker(make_dispatcher(tenants=tenants))
        add(dispatcher, 0, tenant="a")
        add(dispatcher, 1, tenant="a")
        dispatcher.poll(0.0)  # those in service count
        error = refused(dispatcher, 2, tenant="a")
        assert (error.status, error.code, error.param) == (429, "tenant_limit", "tenant")
        assert error.retry_after_ms is not None
        add(dispatcher, 3, tenant="b")
        dispatcher.abort(0)
        add(dispatcher, 4, tenant="a")

    def test_tokens_at_a_time(self) -> None:
        tenants = TenantTable({"a": TenantSettings(max_tokens=100)})
        dispatcher = make_dispatcher(tenants=tenants)
        add(dispatcher, 0, 40, max_tokens=20, tenant="a")
        assert refused(dispatcher, 1, 40, max_tokens=20, tenant="a").status == 429
        add(dispatcher, 2, 20, max_tokens=20, tenant="a")
        add(dispatcher, 3, 400, tenant="b")

    def test_what_could_never_be_is_a_400(self) -> None:
        tenants = TenantTable({"a": TenantSettings(max_tokens=100)})
        error = refused(make_dispatcher(tenants=tenants), 0, 90, max_tokens=20, tenant="a")
        assert (error.status, error.retry_after_ms) == (400, None)
        assert "110" in error.message


class TestDrainMeter:
    def test_idle_time_does_not_count(self) -> None:
        meter = DrainMeter()
        meter.note_tokens(0, True, 0.0)
        meter.note_tokens(100, True, 1.0)
        meter.note_tokens(5, False, 50.0)
        meter.note_tokens(5, True, 100.0)
        assert meter.tokens_per_s == pytest.approx(100.0)

    def test_it_follows_a_change(self) -> None:
        meter = DrainMeter()
        for tenth in range(300):
            meter.note_tokens(10, True, tenth / 10)
        assert meter.tokens_per_s == pytest.approx(100.0)
        for tenth in range(300, 600):
            meter.note_tokens(2, True, tenth / 10)
        assert meter.tokens_per_s == pytest.approx(20.0, rel=0.3)

    def test_nothing_is_known_at_first(self) -> None:
        meter = DrainMeter()
        meter.note_tokens(0, True, 0.0)
        assert meter.tokens_per_s is None
        assert DrainEstimate(is_saturated=True, queued_work=1e9).wait_s() == 0.0


def busy_service(policy: str = "fcfs", num_queued: int = 60) -> VirtualService:
    """One that was saturated for a while, with about so many still queued."""
    service = VirtualService(make_dispatcher(10_000, policy=policy))
    for _ in range(num_queued + 100):
        service.ask(Request(0.0, 64, 16, tenant="flood", slo_class="low"))
    service.run(until=0.1)
    while service.dispatcher.num_queued > num_queued:
        service.run(until=service.now + 0.1)
    return service


class TestEstimates:
    def test_the_wait_it_tells_is_the_wait_it_is(self) -> None:
        service = busy_service()
        told = service.dispatcher.estimate(service.now).wait_s()
        request = Request(service.now, 64, 16)
        service.ask(request)
        service.run(until=service.now + 60.0)
        assert request.ttft == pytest.approx(told, rel=0.25)

    def test_a_hopeless_deadline_is_refused_at_once(self) -> None:
        service = busy_service()
        wait_s = service.dispatcher.estimate(service.now).wait_s()
        hopeless = Request(service.now, 64, 16, timeout_s=wait_s / 2)
        patient = Request(service.now, 64, 16, timeout_s=wait_s * 2)
        service.ask(hopeless)
        service.ask(patient)
        service.run(until=service.now + 60.0)
        assert hopeless.error is not None
        assert (hopeless.error.status, hopeless.error.code) == (429, "deadline_unmeetable")
        assert hopeless.ended_at == hopeless.at
        assert hopeless.error.retry_after_ms == pytest.approx(500 * wait_s, rel=0.1)
        assert patient.error is None

    @pytest.mark.parametrize("policy", ["priority", "wfq", "vtc"])
    def test_who_passes_the_queue_is_not_refused_for_it(self, policy: str) -> None:
        service = busy_service(policy)
        estimate = service.dispatcher.estimate(service.now)
        flood_s = estimate.wait_s("flood", TIERS.get("low"))
        light_s = estimate.wait_s("light", TIERS.get("high"))
        assert flood_s > 0.5
        assert light_s < flood_s / 5

    def test_a_snapshot_does_not_change(self) -> None:
        service = busy_service("vtc")
        estimate = service.dispatcher.estimate(service.now)
        before = estimate.wait_s("flood"), dict(estimate.work_by_tenant)
        service.run(until=service.now + 60.0)
        assert (estimate.wait_s("flood"), dict(estimate.work_by_tenant)) == before
        assert service.dispatcher.estimate(service.now).wait_s("flood") == 0.0

    def test_room_to_spare_means_no_wait(self) -> None:
        assert with_worker(make_dispatcher()).estimate(0.0).wait_s() == 0.0

    def test_a_check_refuses_as_add_does(self) -> None:
        dispatcher = make_dispatcher(1)
        add(dispatcher, 0, slo_class="standard")
        estimate = dispatcher.estimate(0.0)
        estimate.check("a", TIERS.get("high"), None)
        with pytest.raises(RequestError) as error:
            estimate.check("a", TIERS.get("low"), None)
        assert error.value.code == "queue_full"
        dispatcher.drain()
        with pytest.raises(RequestError) as error:
            dispatcher.estimate(0.0).check("a", TIERS.get("high"), None)
        assert error.value.status == 503

    @pytest.mark.parametrize("overload", [2, 6])
    def test_a_client_that_retries_when_told_is_taken_about_then(self, overload: int) -> None:
        """Error of the first retry time against when the client was taken in the end."""
        service = VirtualService(make_dispatcher(40))
        errors: list[float] = []
        refused: dict[int, tuple[Request, float]] = {}  # id of a retry -> first refusal, told

        def retry(ended: Request) -> Request | None:
            first, told = refused.get(id(ended), (ended, 0.0))
            if ended.error is None:
                if first is not ended:
                    errors.append(abs(ended.at - first.at - told) / (ended.at - first.at))
                return None
            assert ended.error.code == "queue_full"
            assert ended.error.retry_after_ms is not None
            again_s = ended.error.retry_after_ms / 1000
            again = Request(service.now + again_s, ended.num_prompt, ended.num_outputs)
            refused[id(again)] = (first, told or again_s)
            return again

        service.on_end = retry
        rng = random.Random(overload)
        at = 0.0
        while at < 15.0:
            at += rng.expovariate(24.0 * overload)
            service.ask(Request(at, rng.randint(16, 96), rng.randint(4, 24)))
        service.run(until=1000.0)
        assert len(errors) > 100
        assert percentile(errors, 0.5) < 0.5


def test_a_cached_prompt_is_charged_less_than_another() -> None:
    dispatcher = with_worker(make_dispatcher(policy="vtc"))
    for seq_id in (0, 1):
        add(dispatcher, seq_id, 100, tenant="cached")
        add(dispatcher, 10 + seq_id, 40, tenant="plain")
    order = []
    for _ in range(4):
        (command,) = dispatcher.poll(0.0)
        assert isinstance(command, Add)
        seq_id = command.sequence.seq_id
        order.append(seq_id)
        cached = 100 if seq_id < 10 else 0
        output = StepOutput(seq_id, 0, fake_token(seq_id, 0), FinishReason.STOP, cached)
        dispatcher.outputs(1, [output], 0.0)
    assert order == [0, 10, 1, 11]


class TestFairShedding:
    def fill(self, policy: str, **config: Any) -> Dispatcher:
        dispatcher = make_dispatcher(4, policy=policy, **config)
        for seq_id in range(4):
            add(dispatcher, seq_id, tenant="flood")
        return dispatcher

    @pytest.mark.parametrize("policy", ["vtc", "wfq"])
    def test_a_full_queue_of_one_tenant_makes_way_for_another(self, policy: str) -> None:
        dispatcher = self.fill(policy)
        assert ends(add(dispatcher, 4, tenant="light")) == [(3, "shed")]
        assert ends(add(dispatcher, 5, tenant="light")) == [(2, "shed")]
        # Now both have as much.
        assert refused(dispatcher, 6, tenant="light").code == "queue_full"
        assert refused(dispatcher, 7, tenant="flood").code == "queue_full"

    def test_other_policies_do_not_know_tenants(self) -> None:
        assert refused(self.fill("priority"), 4, tenant="light").code == "queue_full"

    def test_by_weight(self) -> None:
        tenants = TenantTable({"flood": TenantSettings(weight=8.0)})
        assert refused(self.fill("vtc", tenants=tenants), 4, tenant="light").code == "queue_full"

    def test_a_higher_tier_is_not_shed(self) -> None:
        dispatcher = make_dispatcher(2, policy="wfq")
        add(dispatcher, 0, tenant="flood", slo_class="high")
        add(dispatcher, 1, tenant="flood", slo_class="high")
        assert refused(dispatcher, 2, tenant="light", slo_class="low").code == "queue_full"

    def test_the_estimate_says_so_beforehand(self) -> None:
        dispatcher = self.fill("vtc")
        estimate = dispatcher.estimate(0.0)
        tier = TIERS.get("standard")
        estimate.check("light", tier, None)
        with pytest.raises(RequestError, match="full"):
            estimate.check("flood", tier, None)
        with pytest.raises(RequestError, match="full"):
            estimate.check("light", tier, None, tenant_weight=0.01)
