"""Which blocks of one sequence go when its KV budget is full."""

import random

import pytest

from shoal.scheduler.errors import RequestError
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.session_eviction import (
    HeavyHitterPolicy,
    SessionEviction,
    SinkPolicy,
    make_session_eviction,
)

LOSSY = ["attention_sink", "h2o"]


@pytest.mark.parametrize("num_sinks", [0, 1, 3])
def test_sink_drops_the_oldest_behind_the_sinks(num_sinks: int) -> None:
    policy = SinkPolicy(num_sinks)
    assert policy.choose([5] * 10, 3) == [num_sinks, num_sinks + 1, num_sinks + 2]


def test_h2o_drops_the_lightest_between_sinks_and_recent_ones() -> None:
    policy = HeavyHitterPolicy(num_sink_blocks=2, num_recent_blocks=3)
    assert policy.choose([0, 0, 9, 1, 5, 2, 7, 0, 0, 0], 2) == [3, 5]


def test_h2o_drops_the_oldest_of_equals() -> None:
    policy = HeavyHitterPolicy(num_sink_blocks=1, num_recent_blocks=2)
    assert policy.choose([4] * 8, 3) == [1, 2, 3]


def test_h2o_may_drop_all_candidates() -> None:
    policy = HeavyHitterPolicy(num_sink_blocks=1, num_recent_blocks=2)
    assert policy.choose([9, 8, 7, 0, 0], 2) == [1, 2]


def test_mass_moves_up_with_its_block() -> None:
    eviction = SessionEviction(HeavyHitterPolicy(1, 1), num_blocks=5, num_dropped=2, block_size=4)
    eviction.observe([9, 3, 8, 1])
    eviction.observe([0, 0, 0, 1, 6])
    assert eviction.evict() == [1, 3]
    assert eviction.mass == [6, 6, 4, 0, 0]  # what was seen before counts less
    eviction.observe([1, 1, 1, 1])
    assert eviction.mass == [7, 7, 5, 1, 0]


def test_reset_forgets_the_mass() -> None:
    eviction = make_session_eviction("h2o", 64, 4)
    eviction.observe([3] * 16)
    eviction.reset()
    assert eviction.mass == [0] * 16


@pytest.mark.parametrize("kv_policy", LOSSY)
def test_every_budget_and_block_size_leaves_something_to_choose(kv_policy: str) -> None:
    draw = random.Random(0)
    for block_size in (1, 2, 5, 16, 64, 256):
        for kv_budget in (64, 65, 100, 1024, 5000):
            eviction = make_session_eviction(kv_policy, kv_budget, block_size)
            assert eviction.num_blocks * block_size >= kv_budget
            assert eviction.num_blocks == max(4, -(-kv_budget // block_size))
            eviction.observe([draw.randrange(9) for _ in range(eviction.num_blocks)])
            for _ in range(20):
                dropped = eviction.evict()
                assert len(set(dropped)) == eviction.num_dropped >= 1
                assert dropped == sorted(dropped)
                assert dropped[0] * block_size >= 4  # the sinks stay
                assert dropped[-1] < eviction.num_blocks - 1  # so does the most recent block
            assert eviction.num_dropped * block_size <= max(128, block_size)


@pytest.mark.parametrize(
    ("values", "param", "named"),
    [
        ({"kv_policy": "fifo"}, "kv_policy", "lru, attention_sink, h2o"),
        ({"kv_policy": 3}, "kv_policy", "lru, attention_sink, h2o"),
        ({"kv_policy": "h2o"}, "kv_budget", "[64, 2147483647]"),
        ({"kv_policy": "h2o", "kv_budget": 63}, "kv_budget", "[64, 2147483647]"),
        ({"kv_policy": "attention_sink", "kv_budget": 2**31}, "kv_budget", "[64, 2147483647]"),
        ({"kv_policy": "h2o", "kv_budget": "big"}, "kv_budget", "whole number"),
        ({"kv_policy": "h2o", "kv_budget": True}, "kv_budget", "whole number"),
        ({"kv_budget": 1024}, "kv_budget", "attention_sink or h2o"),
        ({"kv_policy": "lru", "kv_budget": 1024}, "kv_budget", "attention_sink or h2o"),
    ],
)
def test_what_cannot_be_asked_for_is_named(
    values: dict[str, object], param: str, named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict(dict(values))
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert named in caught.value.message


@pytest.mark.parametrize("kv_policy", LOSSY)
def test_a_policy_and_its_budget_are_taken(kv_policy: str) -> None:
    params = SamplingParams.from_dict({"kv_policy": kv_policy, "kv_budget": 64})
    assert (params.kv_policy, params.kv_budget) == (kv_policy, 64)
