"""What is kept of prompts' ends, and how much of it."""

import torch
from builders import make_sequence

from shoal.backend.prompt_ends import KeptLogits, PromptEnd, PromptEnds
from shoal.scheduler.images import ImageSpan
from shoal.scheduler.sequence import Sequence


def test_few_prompts_have_their_logits_kept() -> None:
    kept, logits = KeptLogits(max_bytes=2 * 4 * 100), torch.zeros(100)
    ends = [PromptEnd(torch.zeros(4)) for _ in range(4)]
    for end in ends[:2]:
        kept.keep(end, logits)
    kept.note_use(ends[0])
    kept.keep(ends[2], logits)
    assert [end.logits is not None for end in ends] == [True, False, True, False]
    kept.keep(ends[3], torch.zeros(1000))  # beyond the bound, but the latest
    assert [end.logits is not None for end in ends] == [False, False, False, True]
    kept.keep(ends[0], logits)
    assert [end.logits is not None for end in ends] == [True, False, False, False]


class TestStates:
    def states(self, value: float) -> torch.Tensor:
        return torch.full((64,), float(value))

    def kept(self, ends: PromptEnds, *sequences: Sequence) -> list[float | None]:
        found = [ends.find(sequence) for sequence in sequences]
        return [None if end is None else float(end.states[0]) for end in found]

    def test_the_latest_used_stay_within_the_bound(self) -> None:
        ends = PromptEnds(max_bytes=2000)  # of two
        first, second, third = (make_sequence(idx, 10, prompt_seed=idx) for idx in range(3))
        ends.keep(first, self.states(1))
        ends.keep(second, self.states(2))
        assert self.kept(ends, first) == [1]
        ends.keep(third, self.states(3))
        assert len(ends) == 2
        assert self.kept(ends, first, second, third) == [1, None, 3]

    def test_again_and_too_long(self) -> None:
        ends = PromptEnds(max_bytes=2000)
        sequence, long = make_sequence(1, 10), make_sequence(2, 600)
        for value in range(20):
            ends.keep(sequence, self.states(value))
        ends.keep(long, self.states(1))
        assert len(ends) == 1
        assert self.kept(ends, sequence, long) == [19, None]

    def test_a_copy_is_kept(self) -> None:
        ends, sequence, states = PromptEnds(), make_sequence(1, 3), self.states(1)
        ends.keep(sequence, states)
        states[:] = 0
        assert self.kept(ends, sequence) == [1]

    def test_images_are_not_told_by_token_ids(self) -> None:
        ends, sequence = PromptEnds(), make_sequence(1, 10)
        assert PromptEnds.wants(sequence)
        ends.keep(sequence, self.states(1))
        sequence.images = (ImageSpan(2, 4, b"digest"),)
        assert not PromptEnds.wants(sequence)
        assert ends.find(sequence) is None

    def test_only_a_prompts_end_is_worth_it(self) -> None:
        assert not PromptEnds.wants(make_sequence(1, 10, num_output_tokens=1))
