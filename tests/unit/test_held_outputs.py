"""What waits a step before it is sent, and what never does."""

import random

from shoal.backend.held_outputs import MAX_STEP_S, MIN_OUTPUTS, HeldOutputs
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.sequence import FinishReason

MANY = range(1, MIN_OUTPUTS + 1)  # seq_ids


def tokens(index: int, seq_ids: range = MANY) -> list[StepOutput]:
    return [StepOutput(seq_id, index, SampledToken(seq_id + index)) for seq_id in seq_ids]


def test_every_second_step_sends_two_side_by_side() -> None:
    held = HeldOutputs()
    for index in range(1, 9, 2):
        first, second = tokens(index), tokens(index + 1)
        assert held.take(first, 0.01, goes_on=True) == []
        sent = held.take(second, 0.01, goes_on=True)
        assert sent == [output for pair in zip(first, second, strict=True) for output in pair]


def test_few_sequences_long_steps_and_last_steps_send_at_once() -> None:
    held = HeldOutputs()
    few = tokens(1, range(1, MIN_OUTPUTS))
    assert held.take(few, 0.01, goes_on=True) == few
    assert held.take(tokens(1), 2 * MAX_STEP_S, goes_on=True) == tokens(1)
    assert held.take(tokens(1), 0.01, goes_on=False) == tokens(1)
    assert held.take([], 0.01, goes_on=True) == []


def test_what_waits_is_sent_even_where_the_next_step_brings_nothing_more() -> None:
    held = HeldOutputs()
    held.take(tokens(1), 0.01, goes_on=True)
    assert held.take([], 1.0, goes_on=False) == tokens(1)
    assert held.take([], 0.01, goes_on=False) == []


def test_a_first_token_an_end_and_an_error_do_not_wait() -> None:
    first = StepOutput(20, 0, SampledToken(1))
    end = StepOutput(21, 7, SampledToken(2), FinishReason.STOP)
    error = StepOutput(22, 3, None, FinishReason.ERROR, error="It failed.")
    held = HeldOutputs()
    assert held.take([*tokens(1), first, end, error], 0.01, goes_on=True) == [first, end, error]
    assert held.take(few := tokens(2, range(1, 3)), 0.01, goes_on=True)[-1] == few[-1]


def test_an_end_takes_along_what_its_sequence_held() -> None:
    held = HeldOutputs()
    held.take(tokens(1), 0.01, goes_on=True)
    end = StepOutput(3, 2, SampledToken(9), FinishReason.LENGTH)
    sent = held.take([end], 0.01, goes_on=True)
    assert [output for output in sent if output.seq_id == 3] == [tokens(1)[2], end]
    assert len(sent) == MIN_OUTPUTS + 1


def test_what_was_forgotten_is_not_sent() -> None:
    held = HeldOutputs()
    held.take(tokens(1), 0.01, goes_on=True)
    held.forget(2)
    held.forget(99)
    assert {output.seq_id for output in held.take([], 0.01, goes_on=True)} == set(MANY) - {2}


def test_whatever_happens_each_sequence_hears_all_in_order() -> None:
    draw = random.Random(5)
    for _ in range(50):
        held = HeldOutputs()
        given: dict[int, list[StepOutput]] = {}
        sent: dict[int, list[StepOutput]] = {}
        for step in range(30):
            goes_on = step < 29 and draw.random() < 0.95
            outputs = []
            for seq_id in range(draw.randrange(2 * MIN_OUTPUTS)):
                if draw.random() < 0.9:
                    reason = FinishReason.STOP if draw.random() < 0.02 else None
                    index = len(given.get(seq_id, []))
                    outputs.append(StepOutput(seq_id, index, SampledToken(step), reason))
            for output in outputs:
                given.setdefault(output.seq_id, []).append(output)
            for output in held.take(outputs, draw.choice((0.01, 0.2)), goes_on):
                sent.setdefault(output.seq_id, []).append(output)
                assert given[output.seq_id][len(sent[output.seq_id]) - 1] == output
        assert sent == given
