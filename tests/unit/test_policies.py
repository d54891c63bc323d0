"""The order each policy gives, by itself."""

import random

import pytest

from shoal.scheduler.lazy_heap import LazyHeap
from shoal.scheduler.policies import (
    DECODE_WEIGHT,
    MAX_PASSED_OVER_S,
    POLICY_NAMES,
    QueuePolicy,
    Ticket,
    VtcPolicy,
    make_policy,
    token_cost,
)
from shoal.scheduler.tiers import Tier
from shoal.scheduler.virtual_counters import VirtualCounters

HIGH, STANDARD, LOW = Tier("high", 8.0), Tier("standard", 2.0), Tier("low", 1.0)


def ticket(
    order: int,
    tenant: str = "a",
    tier: Tier = STANDARD,
    *,
    num_prompt: int = 10,
    outputs: float = 10.0,
    **values: float,
) -> Ticket:
    return Ticket(
        seq_id=1000 + order,
        order=order,
        arrival=values.pop("arrival", float(order)),
        tenant=tenant,
        tier=tier,
        num_prompt_tokens=num_prompt,
        expected_outputs=outputs,
        prefix_hit=values.pop("prefix_hit", 0.0),
    )


def serve(policy: QueuePolicy, now: float = 0.0) -> int | None:
    """Take the next one and charge it as if it ran at once; its order."""
    head = policy.peek(now)
    if head is None:
        return None
    policy.take(head, now)
    head.is_prefill_charged = True
    policy.charge(head, prefill_tokens=head.num_prompt_tokens)
    policy.charge(head, decode_tokens=int(head.expected_outputs))
    return head.order


def serve_all(policy: QueuePolicy, now: float = 0.0) -> list[int]:
    orders = []
    while (order := serve(policy, now)) is not None:
        orders.append(order)
    return orders


def queue(name: str, *tickets: Ticket) -> QueuePolicy:
    policy = make_policy(name)
    for item in tickets:
        policy.push(item, 0.0)
    return policy


class TestAll:
    @pytest.mark.parametrize("name", POLICY_NAMES)
    @pytest.mark.parametrize("seed", range(4))
    def test_random_operations_lose_and_double_nothing(self, name: str, seed: int) -> None:
        rng = random.Random(seed)
        policy = make_policy(name)
        queued: dict[int, Ticket] = {}
        running: dict[int, Ticket] = {}
        for order in range(3000):
            now = float(order)
            action = rng.random()
            if action < 0.4:
                item = ticket(
                    order,
                    f"t{rng.randrange(20)}",
                    rng.choice([HIGH, STANDARD, LOW]),
                    num_prompt=rng.randint(1, 50),
                    prefix_hit=rng.random(),
                )
                queued[item.seq_id] = item
                policy.push(item, now)
            elif action < 0.7 and queued:
                head = policy.peek(now)
                assert head is not None
                assert policy.peek(now) is head
                policy.take(head, now)
                running[head.seq_id] = queued.pop(head.seq_id)
                if not head.is_prefill_charged:
                    policy.charge(head, prefill_tokens=head.num_prompt_tokens)
                    head.is_prefill_charged = True
            elif action < 0.8 and queued:
                item = queued.pop(rng.choice(list(queued)))
                policy.remove(item)
            elif action < 0.9 and running:
                item = running.pop(rng.choice(list(running)))
                item.boost = min(item.boost + 1, 3)
                queued[item.seq_id] = item
                policy.push(item, now)
            elif running:
                item = rng.choice(list(running.values()))
                policy.charge(item, decode_tokens=rng.randint(1, 5))
                policy.charge(item, cached_tokens=rng.randint(0, item.num_prompt_tokens))
            other = policy.peek_other({"t0", "t1"}.__contains__)
            assert other is None or other.tenant not in {"t0", "t1"}
            assert (policy.peek(now) is None) == (not queued)
        while (head := policy.peek(1e9)) is not None:
            policy.take(head, 1e9)
            del queued[head.seq_id]
        assert not queued

    @pytest.mark.parametrize("name", POLICY_NAMES)
    def test_one_tenant_in_one_tier_is_served_as_it_came(self, name: str) -> None:
        assert serve_all(queue(name, *map(ticket, (2, 0, 3, 1)))) == [0, 1, 2, 3]

    @pytest.mark.parametrize("name", POLICY_NAMES)
    def test_one_that_comes_back_keeps_its_place(self, name: str) -> None:
        policy = queue(name, *map(ticket, range(3)))
        first = policy.peek(0.0)
        assert first is not None
        policy.take(first, 0.0)
        policy.charge(first, prefill_tokens=10)
        first.boost = 1
        policy.push(first, 0.0)
        assert serve_all(policy) == [0, 1, 2]


class TestPriority:
    def test_higher_tiers_first(self) -> None:
        tickets = [ticket(0, tier=LOW), ticket(1, tier=HIGH), ticket(2), ticket(3, tier=HIGH)]
        assert serve_all(queue("priority", *tickets)) == [1, 3, 2, 0]

    def test_a_tier_passed_over_for_long_gets_a_turn(self) -> None:
        policy = queue("priority", ticket(0, tier=LOW), ticket(1, tier=LOW))
        for order in range(2, 10):
            policy.push(ticket(order, tier=HIGH), 0.0)
        assert serve(policy, 0.1) == 2
        assert serve(policy, MAX_PASSED_OVER_S) == 0
        assert serve(policy, MAX_PASSED_OVER_S + 0.1) == 3
        assert serve(policy, 2 * MAX_PASSED_OVER_S) == 1


class TestVtc:
    def test_the_least_served_tenant_is_next(self) -> None:
        tickets = [ticket(order, "a", num_prompt=100) for order in range(4)]
        tickets += [ticket(10 + order, "b", num_prompt=10) for order in range(4)]
        # a costs 120 each, b 30: after one of a's, four of b's bring them level.
        assert serve_all(queue("vtc", *tickets))[:6] == [0, 10, 11, 12, 13, 1]

    def test_a_newcomer_is_lifted_to_those_that_wait(self) -> None:
        policy = VtcPolicy()
        for order in range(100):
            policy.push(ticket(order, "a"), 0.0)
        for _ in range(50):
            serve(policy)
        served = policy.service("a")
        assert served > 0
        policy.push(ticket(200, "b"), 0.0)
        assert policy.service("b") == served

    def test_a_newcomer_to_an_empty_queue_is_lifted_to_the_last_that_left(self) -> None:
        policy = VtcPolicy()
        policy.push(ticket(0, "a"), 0.0)
        serve(policy)
        policy.push(ticket(1, "b"), 0.0)
        assert policy.service("b") == policy.service("a") > 0

    def test_a_debt_outlasts_an_idle_time(self) -> None:
        policy = VtcPolicy()
        policy.push(ticket(0, "a", num_prompt=1000), 0.0)
        policy.push(ticket(1, "b"), 0.0)
        policy.push(ticket(2, "b"), 0.0)
        serve(policy)
        assert policy.service("a") > 500
        policy.push(ticket(3, "a"), 0.0)
        assert serve_all(policy) == [1, 2, 3]

    def test_cached_tokens_are_given_back(self) -> None:
        policy = VtcPolicy()
        item = ticket(0, "a", num_prompt=100)
        policy.push(item, 0.0)
        policy.charge(item, prefill_tokens=100)
        policy.charge(item, decode_tokens=1, cached_tokens=100)
        assert policy.service("a") == pytest.approx((token_cost(100, 1, 100)) / STANDARD.weight)
        assert token_cost(100, 1, 100) == pytest.approx(10 + DECODE_WEIGHT)

    def test_within_a_tenant_tiers_share_by_weight(self) -> None:
        tickets = [ticket(order, tier=LOW) for order in range(40)]
        tickets += [ticket(100 + order, tier=HIGH) for order in range(40)]
        orders = serve_all(queue("vtc", *tickets))[:18]
        assert sum(order >= 100 for order in orders) == 16

    def test_idle_tenants_are_forgotten(self) -> None:
        policy = VtcPolicy()
        for order in range(10_000):
            policy.push(ticket(order, f"t{order}"), 0.0)
            serve(policy)
        assert len(policy._tenants) < 3000
        assert len(policy._counters._service) < 3000


class TestWfq:
    def test_flows_share_by_weight(self) -> None:
        tickets = [ticket(order, "a", LOW) for order in range(60)]
        tickets += [ticket(100 + order, "b", HIGH) for order in range(60)]
        orders = serve_all(queue("wfq", *tickets))[:54]
        assert sum(order >= 100 for order in orders) == 48

    def test_what_would_finish_first_goes_first(self) -> None:
        tickets = [ticket(0, "a", num_prompt=500), ticket(1, "b", num_prompt=5)]
        assert serve_all(queue("wfq", *tickets)) == [1, 0]

    def test_ties_go_by_weighted_age_and_prefix(self) -> None:
        def orders(arrival: float, prefix_hit: float) -> list[int]:
            tickets = [
                ticket(1, "a", arrival=arrival, prefix_hit=prefix_hit),
                ticket(0, "b", arrival=0.0),
            ]
            return serve_all(queue("wfq", *tickets), now=1.0)

        assert orders(0.1, 0.0) == [0, 1]
        assert orders(0.1, 1.0) == [1, 0]  # 0.4 outweighs the weight of 2 times 0.1
        assert orders(0.3, 1.0) == [0, 1]

    def test_the_same_holds_within_a_flow(self) -> None:
        old, cached = ticket(0, arrival=0.0), ticket(1, arrival=0.1, prefix_hit=1.0)
        assert serve_all(queue("wfq", old, cached)) == [1, 0]


class TestLazyHeap:
    @pytest.mark.parametrize("seed", range(3))
    def test_against_a_sorted_dict(self, seed: int) -> None:
        rng = random.Random(seed)
        heap: LazyHeap[int] = LazyHeap()
        model: dict[int, int] = {}
        for _ in range(5000):
            item = rng.randrange(200)
            if rng.random() < 0.6:
                model[item] = rng.randrange(50)
                heap.push(model[item], item, item)
                assert len(heap._entries) <= 2 * len(model) + 64
            else:
                assert heap.remove(item) == (model.pop(item, None) is not None)
            first = heap.peek()
            assert first == min(model, key=lambda i: (model[i], i), default=None)
            assert len(heap) == len(model)


class TestVirtualCounters:
    def test_a_gift_moves_a_waiting_key_up(self) -> None:
        counters = VirtualCounters()
        for key in ("a", "b"):
            counters.enter(key)
            counters.charge(key, 100.0)
        counters.charge("b", -150.0)
        assert counters.least() == "b"

    def test_ties_within_a_quantum(self) -> None:
        counters = VirtualCounters()
        for key, cost in (("a", 10.0), ("b", 10.5), ("c", 11.5), ("d", 99.0)):
            counters.enter(key, offset=cost)
        assert counters.least_tied(1.0, 8) == ["a", "b"]
        assert counters.least_tied(2.0, 2) == ["a", "b"]
        assert counters.least_tied(2.0, 8) == ["a", "b", "c"]

    def test_another_may_pass_by_a_burst_at_most(self) -> None:
        counters = VirtualCounters()
        for key, cost in (("a", 0.0), ("b", 200.0), ("c", 300.0)):
            counters.enter(key)
            counters.charge(key, cost)
        assert counters.least_other({"a"}.__contains__, 256.0) == "b"
        assert counters.least_other({"a", "b"}.__contains__, 256.0) is None
        assert counters.least() == "a"


def test_a_quiet_time_earns_a_bounded_credit() -> None:
    counters = VirtualCounters()
    counters.enter("light", credit=100.0)
    counters.leave("light")
    counters.enter("flood")
    counters.charge("flood", 30.0)
    counters.enter("light", credit=100.0)
    assert counters.service("light") == 0.0  # all of what it did not use
    counters.leave("light")
    counters.charge("flood", 1000.0)
    counters.enter("light", credit=100.0)
    assert counters.service("light") == 930.0
    counters.enter("new", credit=100.0)
    assert counters.service("new") == 930.0  # a stranger has earned nothing


def test_lag_is_behind_the_most_served_that_was_taken() -> None:
    counters = VirtualCounters()
    counters.enter("flood")
    counters.enter("light")
    counters.charge("flood", 300.0)
    assert counters.lag("light") == 0.0  # nothing of the flood was taken since
    counters.note_taken("flood")
    assert counters.lag("light") == 300.0
    assert counters.lag("flood") == 0.0
