"""How a step's tokens are shared by urgency and pace, and how the pace is learned."""

import pytest
from builders import make_sampling

from shoal.scheduler import step_budget
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.step_pace import StepPace

BUDGET = 512


def prefill(seq_id: int, num_tokens: int, urgency: int = 0) -> Sequence:
    return Sequence(seq_id, [7] * num_tokens, num_tokens, make_sampling(), urgency=urgency)


def decode(seq_id: int, tpot_s: float | None = None) -> Sequence:
    sequence = Sequence(seq_id, [7] * 9, 8, make_sampling(), tpot_s=tpot_s)
    sequence.num_computed_tokens = 8
    return sequence


def make_pace(base: float, rate: float, decode: float | None = None) -> StepPace:
    """The pace of a model whose steps take ``base + rate * prompt tokens + decode * decodes``."""
    decode = rate if decode is None else decode
    return StepPace.measured(lambda decodes, tokens, _: base + decode * decodes + rate * tokens)


def share_budget(
    members: list[Sequence],
    budget: int,
    pace: StepPace,
    decode_stretch: float = 2.0,
    have_waited: bool = True,
) -> dict[int, int]:
    return step_budget.share_budget(members, budget, pace, decode_stretch, have_waited)


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

    def test_the_others_get_their_part_of_every_second_step(self) -> None:
        members = [decode(5), prefill(0, 900, urgency=-1), prefill(1, 9000, urgency=1)]
        have_waited, parts = False, []
        for _ in range(4):
            shares = share_budget(members, BUDGET, StepPace(), have_waited=have_waited)
            have_waited = step_budget.some_wait(members, shares)
            assert shares[5] == 1
            assert sum(shares.values()) == BUDGET
            parts.append(shares.get(0, 0))
        assert parts == [0, BUDGET // 16 - 1, 0, BUDGET // 16 - 1]

    def test_nobody_waits_where_all_are_urgent_or_none_is(self) -> None:
        for urgency in (1, 0, -1):
            members = [decode(5), prefill(0, 900, urgency), prefill(1, 900, urgency)]
            assert not step_budget.some_wait(members, {5: 1})

    def test_of_two_urgent_prompts_with_room_for_one_the_first_ends(self) -> None:
        members = [decode(0), prefill(1, 300, urgency=1), prefill(2, 290, urgency=1)]
        shares = share_budget(members, BUDGET, StepPace(), have_waited=False)
        assert shares == {0: 1, 1: 300, 2: BUDGET - 301}

    def test_a_short_urgent_prompt_does_not_wait_for_a_long_one(self) -> None:
        members = [prefill(1, 3000, urgency=1), prefill(2, 290, urgency=1), prefill(3, 20, 1)]
        shares = share_budget(members, BUDGET, StepPace(), have_waited=False)
        assert shares == {1: 256, 2: 236, 3: 20}

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
        members = [decode(0, tpot_s=0.3), decode(1, tpot_s=0.1), prefill(3, 600)]
        assert 80 < sum(share_budget(members, BUDGET, pace).values()) <= 90

    def test_a_target_out_of_reach_does_not_stop_prefills(self) -> None:
        pace = make_pace(base=0.010, rate=0.001)
        shares = share_budget([decode(0, tpot_s=0.001), prefill(1, 600)], BUDGET, pace)
        assert shares == {0: 1, 1: 31}

    def test_it_means_nothing_before_a_first_token(self) -> None:
        pace = make_pace(base=0.010, rate=0.001)
        waiting = prefill(0, 600)
        waiting.tpot_s = 0.05
        assert share_budget([waiting, prefill(1, 40)], BUDGET, pace) == {0: 472, 1: 40}


class TestStretch:
    """Decodes without a target of their own."""

    BASE, RATE, DECODE = 0.010, 0.001, 0.002

    def seconds(self, shares: dict[int, int], num_decodes: int) -> float:
        num_prompt_tokens = sum(shares.values()) - num_decodes
        return self.BASE + self.RATE * num_prompt_tokens + self.DECODE * num_decodes

    def share(self, num_decodes: int, num_prefills: int, stretch: float) -> dict[int, int]:
        members = [decode(i) for i in range(num_decodes)]
        members += [prefill(100 + i, 2000) for i in range(num_prefills)]
        pace = make_pace(self.BASE, self.RATE, self.DECODE)
        shares = share_budget(members, BUDGET, pace, stretch)
        assert all(shares[i] == 1 for i in range(num_decodes))
        return shares

    @pytest.mark.parametrize("num_decodes", [12, 16, 32, 64])
    @pytest.mark.parametrize("stretch", [1.7, 2.0, 3.0])
    def test_a_prompt_stretches_their_step_so_far(self, num_decodes: int, stretch: float) -> None:
        alone = self.BASE + self.DECODE * num_decodes
        seconds = self.seconds(self.share(num_decodes, 1, stretch), num_decodes)
        assert seconds == pytest.approx(stretch * alone, rel=0.1)

    def test_several_prompts_no_farther_while_eight_decode_for_each(self) -> None:
        one, several = self.share(32, 1, 2.0), self.share(32, 4, 2.0)
        assert sum(one.values()) == sum(several.values())

    @pytest.mark.parametrize(("num_waiting", "weight"), [(10, 2), (15, 3), (20, 4), (400, 4)])
    def test_each_that_waits_weighs_as_much_as_eight_that_decode(
        self, num_waiting: int, weight: int
    ) -> None:
        alone = self.BASE + self.DECODE * 40
        seconds = self.seconds(self.share(40, num_waiting, 2.0), 40)
        assert seconds == pytest.approx((1 + weight) * alone, rel=0.15)

    def test_a_burst_is_computed_in_full_rows_while_most_of_it_waits(self) -> None:
        pace = make_pace(base=0.001, rate=0.001)
        burst = [prefill(i, 128) for i in range(10, 14)]
        for num_decodes, tpot_s, num_rows in ((3, None, 128), (4, None, 32), (3, 0.01, 32)):
            members = [*(decode(i, tpot_s) for i in range(num_decodes)), *burst]
            assert sum(share_budget(members, BUDGET, pace).values()) == num_rows

    def test_rows_stay_enough_for_one_reading_of_the_weights(self) -> None:
        assert sum(self.share(1, 1, 1.0).values()) == 32
        assert sum(self.share(20, 1, 1.0).values()) == 20 + 16

    def test_without_decodes_all_of_the_budget_is_used(self) -> None:
        assert sum(self.share(0, 1, 1.0).values()) == BUDGET

    def test_what_steps_cost_most_of_does_not_shrink_a_portion(self) -> None:
        """Where reading the weights takes most of the time, prompts cost decodes little."""
        pace = make_pace(base=0.010, rate=0.00002)
        members = [decode(0), decode(1), prefill(2, 2000)]
        assert sum(share_budget(members, BUDGET, pace).values()) > 400

    def test_an_urgent_one_weighs_as_much_as_it_may(self) -> None:
        members = [*(decode(i) for i in range(8)), prefill(50, 2000, -1), prefill(60, 2000, 1)]
        shares = share_budget(members, BUDGET, make_pace(self.BASE, self.RATE, self.DECODE))
        alone = self.BASE + self.DECODE * 8
        assert self.seconds(shares, 8) == pytest.approx(5 * alone, rel=0.15)
        assert shares[60] > 10 * shares[50]
        shares = share_budget(members, BUDGET, make_pace(0.001, 0.001, 0.0), 1.0)
        assert sum(shares.values()) == 128

    def test_who_yields_does_not_weigh(self) -> None:
        members = [decode(0)] + [prefill(1 + i, 2000, urgency=-1) for i in range(9)]
        pace = make_pace(self.BASE, self.RATE, self.DECODE)
        assert sum(share_budget(members, BUDGET, pace).values()) == 32


class TestPace:
    @pytest.mark.parametrize("is_measured", [True, False])
    def test_it_learns_base_and_rates(self, is_measured: bool) -> None:
        pace = make_pace(base=0.02, rate=0.0001, decode=0.001) if is_measured else StepPace()
        for _ in range(40):
            for decodes, tokens in ((16, 0), (1, 0), (0, 500), (3, 64), (8, 0), (16, 200)):
                pace.note(decodes, tokens, 0.02 + 0.0001 * tokens + 0.001 * decodes)
        assert pace.seconds(10) == pytest.approx(0.03, rel=0.05)
        assert pace.prompt_work_in(0.05, 10) == pytest.approx(200, rel=0.05)
        assert pace.tokens_of_base == pytest.approx(200, rel=0.05)

    def test_it_follows_a_change(self) -> None:
        pace = make_pace(base=0.02, rate=0.0001)
        for step in range(100):
            num_tokens = step % 5 * 50
            pace.note(10, num_tokens, 0.02 + 0.001 * num_tokens)
        assert pace.prompt_work_in(0.12, 10) == pytest.approx(100, rel=0.05)

    def test_a_machine_is_not_always_steady_when_it_is_measured(self) -> None:
        pace = StepPace.measured(lambda decodes, *_: 0.05 if decodes == 1 else 0.02)
        assert pace.seconds(3) == 0.05
        assert pace.prompt_work_in(0.1, 3) > 10**6
        for _ in range(40):
            pace.note(8, 0, 0.02)
            pace.note(8, 100, 0.04)
        assert pace.prompt_work_in(0.04, 8) == pytest.approx(100, rel=0.1)

    def test_a_prompt_whose_context_grows_does_not_make_decodes_dear(self) -> None:
        pace = make_pace(base=0.01, rate=0.0005, decode=0.001)
        for step in range(70):
            pace.note(16, 40, 0.026 + 40 * 0.0005 * (1 + step / 50))
        assert pace.seconds(16) == pytest.approx(0.026, rel=0.15)
        assert pace.seconds(16, 40) == pytest.approx(0.074, rel=0.1)

    def test_one_shape_alone_makes_nothing_drift(self) -> None:
        pace = make_pace(base=0.02, rate=0.0001, decode=0.001)
        for _ in range(5000):
            pace.note(16, 40, 0.04)
        assert pace.seconds(16) == pytest.approx(0.036, rel=0.05)

    def test_a_step_that_was_held_up_changes_little(self) -> None:
        pace = make_pace(base=0.02, rate=0.0001, decode=0.001)
        pace.note(16, 0, 5.0)
        assert pace.seconds(16) < 1.4 * 0.036

    def test_knowing_nothing_it_limits_nothing(self) -> None:
        pace = StepPace()
        assert pace.prompt_work_in(0.001, 3) > 10**6
        assert pace.tokens_of_base == 0

    def test_context_makes_a_token_more_work(self) -> None:
        pace = StepPace.measured(
            lambda decodes, tokens, computed: 0.01 + 0.001 * tokens * (1 + computed / 2000)
        )
        assert pace.work_of_token(0) == 1
        assert pace.work_of_token(4000) == pytest.approx(3)
        late = prefill(1, 5000)
        late.num_computed_tokens = 4000
        shares = share_budget([decode(0), late], BUDGET, pace, 20.0)
        # One that waits beside one decode weighs four times.
        longest = (1 + 19 * 4) * pace.seconds(1)
        assert pace.seconds(1, 3 * shares[1]) == pytest.approx(longest, rel=0.1)
        late.urgency = -1
        assert share_budget([late], BUDGET, pace)[1] == pytest.approx(96 / 3, abs=1)

    def test_the_first_step_counts_by_its_rows(self) -> None:
        pace = StepPace()
        pace.note(4, 80, 0.1)
        assert pace.seconds(34) == pytest.approx(0.05)
