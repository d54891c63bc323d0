"""Promises between tenants and tiers, each run in virtual time and repeatable by its seed."""

import random
from collections import Counter

import pytest
from virtual_service import Request, VirtualService, percentile

from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.policies import DECODE_WEIGHT, PREFILL_WEIGHT, VtcPolicy, make_policy
from shoal.scheduler.preemption import PreemptionConfig
from shoal.scheduler.tiers import TenantSettings, TenantTable, Tier, TierTable

TIERS = TierTable([Tier("high", 8.0), Tier("standard", 2.0), Tier("low", 1.0)])


def make_service(
    policy: str,
    *,
    tenants: dict[str, TenantSettings] | None = None,
    max_preemptions: int = 2,
    max_num_seqs: int = 8,
    num_blocks: int = 400,
) -> VirtualService:
    config = DispatcherConfig(
        100_000,
        policy=policy,
        tiers=TIERS,
        tenants=TenantTable(tenants),
        preemption=PreemptionConfig(max_preemptions),
    )
    return VirtualService(Dispatcher(config), max_num_seqs=max_num_seqs, num_blocks=num_blocks)


def arrivals(rng: random.Random, per_s: float, until: float, **fields: str) -> list[Request]:
    """A Poisson stream of requests."""
    requests = []
    at = rng.expovariate(per_s)
    while at < until:
        requests.append(Request(at, rng.randint(16, 96), rng.randint(4, 24), **fields))
        at += rng.expovariate(per_s)
    return requests


def light_p95(policy: str, seed: int, *, is_flooded: bool) -> float:
    service = make_service(policy, max_num_seqs=24, num_blocks=800)
    rng = random.Random(seed)
    for request in arrivals(rng, 8.0, 30.0, tenant="light"):
        service.ask(request)
    if is_flooded:
        for request in arrivals(rng, 80.0, 30.0, tenant="flood"):
            service.ask(request)
    service.run(until=30.0)
    return percentile([request.ttft for request in service.served(tenant="light")], 0.95)


@pytest.mark.parametrize("policy", ["vtc", "wfq"])
@pytest.mark.parametrize("seed", range(3))
def test_a_light_tenant_hardly_notices_a_flood(policy: str, seed: int) -> None:
    alone = light_p95(policy, seed, is_flooded=False)
    beside = light_p95(policy, seed, is_flooded=True)
    assert beside <= 1.5 * alone


def test_without_fairness_it_would() -> None:
    alone = light_p95("fcfs", 0, is_flooded=False)
    assert light_p95("fcfs", 0, is_flooded=True) > 5 * alone


class Backlog:
    """Keeps ``depth`` requests of each party queued, and sums up its weighted service."""

    def __init__(
        self,
        service: VirtualService,
        seed: int,
        parties: list[dict[str, str]],
        depth: int = 12,
        sizes: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        self.service = service
        self.rng = random.Random(seed)
        self.sizes = sizes or {}
        for party in parties:
            for _ in range(depth):
                service.ask(self.request(0.0, party))
        service.on_end = lambda ended: self.request(
            service.now, {"tenant": ended.tenant, "slo_class": ended.slo_class or "standard"}
        )

    def request(self, at: float, party: dict[str, str]) -> Request:
        longest_prompt, most_outputs = self.sizes.get(party["tenant"], (96, 32))
        num_prompt = self.rng.randint(longest_prompt // 4, longest_prompt)
        return Request(at, num_prompt, self.rng.randint(most_outputs // 4, most_outputs), **party)

    def weighted_service(self) -> dict[str, float]:
        """Tokens computed so far, by tenant."""
        total: Counter[str] = Counter()
        for request in self.service.requests:
            if request.token_times:
                total[request.tenant] += PREFILL_WEIGHT * request.num_prompt
                total[request.tenant] += DECODE_WEIGHT * len(request.token_times)
        return dict(total)


@pytest.mark.parametrize("seed", range(6))
def test_vtc_keeps_two_backlogged_tenants_within_the_papers_bound(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([60, 200])
    service = make_service("vtc", max_num_seqs=rng.choice([4, 8]), num_blocks=num_blocks)
    sizes = {"red": (rng.choice([16, 200]), rng.choice([8, 60])), "green": (200, 8)}
    backlog = Backlog(
        service, seed, [{"tenant": "red"}, {"tenant": "green"}], depth=20, sizes=sizes
    )
    bound = 2 * max(PREFILL_WEIGHT * 200, DECODE_WEIGHT * 16 * num_blocks)
    gaps = [0.0]

    def note_gap() -> None:
        served = backlog.weighted_service()
        gaps.append(served.get("red", 0.0) - served.get("green", 0.0))

    service.run(until=15.0, each_step=note_gap)
    # Any interval: its gap is a difference of two of these.
    assert max(gaps) - min(gaps) <= bound
    assert min(backlog.weighted_service().values()) > 2000


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


@pytest.mark.parametrize("policy", ["vtc", "wfq"])
def test_equal_tenants_get_equal_service(policy: str) -> None:
    service = make_service(policy)
    names = ["a", "b", "c", "d", "e"]
    sizes = {name: (48 * (i + 1), 8 * (i + 1)) for i, name in enumerate(names)}
    backlog = Backlog(service, 3, [{"tenant": name} for name in names], sizes=sizes)
    service.run(until=40.0)
    index = jain(list(backlog.weighted_service().values()))
    assert index >= 0.95


@pytest.mark.parametrize("policy", ["wfq", "vtc"])
@pytest.mark.parametrize("seed", range(3))
def test_shares_follow_the_weights(policy: str, seed: int) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    tenants = {name: TenantSettings(weight) for name, weight in weights.items()}
    service = make_service(policy, tenants=tenants, max_num_seqs=16)
    sizes = {"a": (96, 32), "b": (200, 8), "c": (48, 24)}
    backlog = Backlog(service, seed, [{"tenant": n} for n in weights], depth=40, sizes=sizes)
    service.run(until=60.0)
    served = backlog.weighted_service()
    for name, weight in weights.items():
        share = served[name] / sum(served.values())
        assert share == pytest.approx(weight / sum(weights.values()), rel=0.05)


@pytest.mark.parametrize("policy", ["priority", "wfq", "vtc"])
@pytest.mark.parametrize("seed", range(3))
def test_a_high_tier_is_quick_at_saturation_and_the_lowest_progresses(
    policy: str, seed: int
) -> None:
    service = make_service(policy)
    rng = random.Random(seed)
    duration = 30.0
    tenants = {"high": "one", "standard": "two", "low": "three"}
    for slo_class, per_s in (("high", 6.0), ("standard", 20.0), ("low", 20.0)):
        for request in arrivals(
            rng, per_s, duration, slo_class=slo_class, tenant=tenants[slo_class]
        ):
            service.ask(request)
    service.run(until=duration)
    assert service.dispatcher.num_queued > 50  # saturated
    high = percentile([r.ttft for r in service.served(slo_class="high")], 0.5)
    low = percentile([r.ttft for r in service.served(slo_class="low")], 0.5)
    assert high <= low / 3
    times = sorted(at for r in service.served(slo_class="low") for at in r.token_times)
    pauses = [b - a for a, b in zip([0.0, *times], [*times, duration], strict=True)]
    assert max(pauses) <= 5.0


def test_the_lowest_tier_progresses_even_when_the_high_one_floods() -> None:
    service = make_service("priority")
    rng = random.Random(5)
    for request in arrivals(rng, 60.0, 40.0, slo_class="high"):
        service.ask(request)
    for request in arrivals(rng, 2.0, 40.0, slo_class="low"):
        service.ask(request)
    service.run(until=40.0)
    times = sorted(at for r in service.served(slo_class="low") for at in r.token_times)
    pauses = [b - a for a, b in zip([0.0, *times], [*times, 40.0], strict=True)]
    assert max(pauses) <= 5.0


def test_runs_repeat() -> None:
    def trace() -> list[float | None]:
        service = make_service("wfq")
        for request in arrivals(random.Random(1), 20.0, 10.0, tenant="a", slo_class="low"):
            service.ask(request)
        service.run(until=10.0)
        return [request.first_token_at for request in service.requests]

    assert trace() == trace()


def test_policies_have_names() -> None:
    assert isinstance(make_policy("vtc"), VtcPolicy)
    with pytest.raises(ValueError, match="fcfs, priority, wfq, vtc"):
        make_policy("lifo")
