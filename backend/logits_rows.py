"""Which tokens of a step need logits: the last of those that sample, and prompts to score."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.scheduler.outputs import ScheduledSequence


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Logits rows, from ``first_row`` on, that predict the prompt tokens at ``positions``."""

    item: ScheduledSequence
    first_row: int
    positions: range


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """Logits rows, from ``first_row`` on, of the prompt tokens at ``positions``."""

    item: ScheduledSequence
    first_row: int
    positions: range


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The order of the logits of a step."""

    batch_rows: list[int] = field(default_factory=list)  # of the hidden states, one a logits row
    sampled: list[int] = field(default_factory=list)  # logits rows to sample from, in batch order
    scored: list[ScoredTokens] = field(default_factory=list)
    pooled: list[PooledTokens] = field(default_factory=list)

    @classmethod
    def of(cls, scheduled: Iterable[ScheduledSequence]) -> "LogitsRows":
        """Lay out the logits of a step."""
        rows = cls()
        start = 0  # of the item in the batch
        for item in scheduled:
            if item.sequence.scores_prompt:
                rows._add_scored(item, start)
            if item.sequence.sampling.pooling is not None:
                rows._add_pooled(item, start)
            if item.samples:
                rows.sampled.append(len(rows.batch_rows))
                rows.batch_rows.append(start + item.num_tokens - 1)
            start += item.num_tokens
        return rows

    def _add_pooled(self, item: ScheduledSequence, start: int) -> None:
        """Of a mean every row; of the last token the row that is sampled from, which follows."""
        first, first_row = item.sequence.num_computed_tokens, len(self.batch_rows)
        end = first + item.num_tokens
        if item.sequence.sampling.pooling == "mean":
            num_before = item.num_tokens - 1 if item.samples else item.num_tokens
            self.batch_rows.extend(range(start, start + num_before))
            self.pooled.append(PooledTokens(item, first_row, range(first, end)))
        elif item.samples:
            self.pooled.append(PooledTokens(item, first_row, range(end - 1, end)))

    def _add_scored(self, item: ScheduledSequence, start: int) -> None:
        """The row of one position predicts the token at the next."""
        first = item.sequence.num_computed_tokens
        end = min(first + item.num_tokens, item.sequence.num_prompt_tokens - 1)
        self.scored.append(ScoredTokens(item, len(self.batch_rows), range(first + 1, end + 1)))
        self.batch_rows.extend(range(start, start + end - first))
