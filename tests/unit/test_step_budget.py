"""How a step's tokens are shared by urgency and pace, and how the pace is learned."""

import pytest
from builders import make_sampling

from shoal.scheduler.sequence import Sequence
from shoal.scheduler.step_budget import share_budget
from shoal.scheduler.step_pace import StepPace

BUDGET = 512


def prefill(seq_id: int, num_tokens: int, urgency: int = 0) -> Sequence:
    return Sequence(seq_id, [7] * num_tokens, num_tokens, make_sampling(), urgency=urgency)


def decode(seq_id: int, tpot_s: float | None = None) -> Sequence:
    sequence = Sequence(seq_id, [7] * 9, 8, make_sampling(), tpot_s=tpot_s)
    sequence.num_computed_tokens = 8
    return sequence


def make_pace(base: float, rate: float) -> StepPace:
    pace = StepPace()
    for num_tokens in (1, 500, 64, 200, 300, 8):
        pace.note(num_tokens, base + rate * num_tokens)
    return pace


class TestUrgency:
    def test_without_any_the_whole_budget_is_used(self) -> None:
        shares = share_budget([decode(0), prefill(1, 600), prefill(2, 100)], BUDGET, StepPace())
        assert shares == {0: 1, 1: 411, 2: 100}

    def test_yielding_prefills_take_small_portions(self) -> None:
        members = [decode(0), prefill(1, 600, urgency=-1), prefill(2, 20, urgency=-1)]
        shares = share_budget(members, BUDGET, StepPace())
        assert shares == {0: 1, 1: 76, 2: 20}

    def test_portions_are_not_so_small_that_a_step_is_mostly_overhead(self) -> None:
        pace = make_pace(base=0.1, rate=0.0005)  # a step costs as much as 200 tokens
        shares = share_budget([prefill(1, 600, urgency=-1)], BUDGET, pace)
        assert shares[1] == pytest.approx(200, abs=2)

    def test_urgent_prefills_go_first_and_the_others_still_get_some(self) -> None:
        members = [prefill(i, 600, urgency=-1) for i in range(3)] + [prefill(9, 470, urgency=1)]
        shares = share_budget(members, BUDGET, StepPace())
        assert shares[9] == 470
        assert 0 < sum(shares.values()) - 470 <= BUDGET // 16

    def test_no_urgent_flood_starves_the_earliest(self) -> None:
        members = [prefill(0, 9000, urgency=-1)] + [prefill(i, 512, urgency=1) for i in range(1, 9)]
        shares = share_budget(members, BUDGET, StepPace())
        assert shares[0] == BUDGET // 16
        assert sum(shares.values()) == BUDGET

    def test_the_budget_holds_whoever_is_urgent(self) -> None:
        for budget in range(4, 40):
            members = [decode(0), decode(1), prefill(2, 30, -1), prefill(3, 30, 1), prefill(4, 5)]
            shares = share_budget(members, budget, StepPace())
            assert sum(shares.values()) <= budget
            assert shares[0] == shares[1] == 1
            assert shares.get(2, 0) + shares.get(4, 0) >= 1


class TestTpot:
    def test_a_step_is_no_longer_than_its_decodes_want(self) -> None:
        pace = make_pace(base=0.010, rate=0.001)
        shares = share_budget([decode(0, tpot_s=0.1), prefill(1, 600)], BUDGET, pace)
        assert 0.010 + 0.001 * sum(shares.values()) == pytest.approx(0.1, abs=0.002)

    def test_the_strictest_counts(self) -> None:
        pace = make_pace(base=0.010, rate=0.001)
        members = [decode(0, tpot_s=0.3), decode(1, tpot_s=0.1), decode(2), prefill(3, 600)]
        assert 80 < sum(share_budget(members, BUDGET, pace).values()) <= 90

    def test_a_target_out_of_reach_does_not_stop_prefills(self) -> None:
        pace = make_pace(base=0.010, rate=0.001)
        shares = share_budget([decode(0, tpot_s=0.001), prefill(1, 600)], BUDGET, pace)
        assert shares[1] == BUDGET // 16

    def test_it_means_nothing_before_a_first_token(self) -> None:
        pace = make_pace(base=0.010, rate=0.001)
        waiting = prefill(0, 600)
        waiting.tpot_s = 0.05
        assert share_budget([waiting, prefill(1, 40)], BUDGET, pace) == {0: 472, 1: 40}


class TestPace:
    def test_it_learns_base_and_rate(self) -> None:
        pace = make_pace(base=0.02, rate=0.0001)
        assert pace.num_tokens_in(0.04) == pytest.approx(200, abs=2)
        assert pace.tokens_of_base == pytest.approx(200, abs=2)

    def test_it_follows_a_change(self) -> None:
        pace = make_pace(base=0.02, rate=0.0001)
        for step in range(400):
            pace.note(10 + step % 90, 0.01 + 0.001 * (10 + step % 90))
        assert pace.num_tokens_in(0.11) == pytest.approx(100, abs=3)

    def test_steps_of_one_size_are_taken_to_have_no_base(self) -> None:
        pace = StepPace()
        for _ in range(10):
            pace.note(64, 0.064)
        assert pace.num_tokens_in(0.1) == pytest.approx(100, abs=1)

    def test_little_evidence_limits_nothing(self) -> None:
        pace = StepPace()
        pace.note(100, 1.0)
        assert pace.num_tokens_in(0.001) > 10**6
        assert pace.tokens_of_base == 0
