"""What the benchmark of two tenants makes of its records."""

import pytest

from shoal.load.live_client import LiveRecord, LiveRequest
from shoal.load.sharing import Loads


def record(ttft: float | None, *token_times: float) -> LiveRecord:
    made = LiveRecord(LiveRequest(0.0, 8, 4), sent=1.0)
    made.first_token = None if ttft is None else 1.0 + ttft
    made.token_times = list(token_times)
    return made


class TestLoads:
    def test_the_ratio_is_that_of_all_rounds_together(self) -> None:
        loads = Loads([record(0.1) for _ in range(40)], [record(0.1 + i / 40) for i in range(40)])
        assert loads.ratio() == pytest.approx((0.1 + 38 / 40) / 0.1)

    def test_requests_without_a_token_are_the_slowest(self) -> None:
        beside = [record(None), *(record(0.2) for _ in range(9))]
        assert Loads([record(0.1) for _ in range(10)], beside).ratio() == float("inf")

    def test_what_is_likely_surrounds_the_ratio(self) -> None:
        alone = [record(0.1 + i % 7 / 100) for i in range(60)]
        loads = Loads(alone, [record(0.15 + i % 11 / 50) for i in range(60)])
        low, high = loads.likely_ratios()
        assert low <= loads.ratio() <= high
        assert loads.likely_ratios() == (low, high)

    def test_gaps_are_between_tokens_of_one_request(self) -> None:
        loads = Loads(heavy=[record(0.5, 1.5, 1.75), record(0.5, 9.0), record(None)])
        assert loads.heavy_gaps() == [0.25]
