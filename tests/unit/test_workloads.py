"""The workloads: their sizes, rates and what they share."""

import pytest
from simulations import CONFIG, make_options, simulate

from shoal.load.measures import summarize
from shoal.load.simulation import saturation_rate
from shoal.load.workload import Segment, segment_tokens
from shoal.load.workloads import WORKLOADS


def test_segments_of_one_key_share_their_tokens() -> None:
    short, long = segment_tokens(Segment("a", 5)), segment_tokens(Segment("a", 9))
    assert long[:5] == short
    assert segment_tokens(Segment("b", 5)) != short


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_workloads_have_the_wanted_size_in_order(name: str) -> None:
    workload = WORKLOADS[name](make_options(num_requests=220))
    arrivals = [request.arrival for request in workload.requests]
    assert arrivals == sorted(arrivals)
    expected = {"light_alone": 20, "saturating_tenants": 219}.get(name, 220)
    assert workload.num_requests == expected
    assert workload.description


def test_load_is_relative_to_the_capacity() -> None:
    spans = [
        WORKLOADS["poisson"](make_options(load=load, num_requests=100)).requests[-1].arrival
        for load in (0.5, 1.0)
    ]
    assert spans[0] == pytest.approx(2 * spans[1])


def test_saturation_rate_is_near_what_a_flooded_worker_does() -> None:
    workload = WORKLOADS["overload"](make_options(num_requests=800))
    result = simulate(workload)
    expected = saturation_rate(CONFIG, [request.lengths for request in workload.requests])
    assert summarize(result).requests_per_s == pytest.approx(expected, rel=0.3)


def test_the_light_tenant_is_the_same_alone_and_beside_the_flood() -> None:
    both = WORKLOADS["two_tenants"](make_options(seed=4)).requests
    alone = WORKLOADS["light_alone"](make_options(seed=4)).requests
    light = [request for request in both if request.tenant == "light"]
    assert [(r.arrival, r.prompt) for r in light] == [(r.arrival, r.prompt) for r in alone]
    assert len(both) - len(light) == 10 * len(light)


def test_system_prompts_share_all_but_the_question() -> None:
    requests = WORKLOADS["system_prompts"](make_options()).requests
    distinct = {request.prompt[0] for request in requests}
    assert len(requests) == 1000
    assert 10 <= len(distinct) <= 20
    assert {segment.num_tokens for segment in distinct} == {512}
    repeated = (len(requests) - len(distinct)) * 512
    assert repeated / sum(request.num_prompt_tokens for request in requests) >= 0.9


def test_bursts_come_in_one_second_of_thirty() -> None:
    requests = WORKLOADS["bursts"](make_options(load=0.05, num_requests=1000)).requests
    in_burst = sum(request.arrival % 30.0 < 1.0 for request in requests)
    assert 0.45 < in_burst / len(requests) < 0.6


def test_traces_keep_their_times_and_sharing() -> None:
    options = make_options(num_requests=500, time_factor=2.0)
    azure = WORKLOADS["azure"](options).requests
    assert azure[0].num_prompt_tokens == round(374 / 16)
    assert azure[0].num_output_tokens == round(44 / 16)
    assert azure[1].arrival == pytest.approx(2 * 4.314579)
    mooncake = WORKLOADS["mooncake"](options).requests
    first, second = mooncake[0].prompt_tokens(), mooncake[1].prompt_tokens()
    assert len(first) == round(6758 / 16)
    assert first[:32] == second[:32]  # both begin with hash id 0
    assert first[32:64] != second[32:64]
