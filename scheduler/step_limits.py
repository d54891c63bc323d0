"""What the next step may do at most, when memory for running it is short."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLimits:
    """``max_num_tokens`` may be below the number of running sequences: they take turns then."""

    max_num_tokens: int
    admits: bool = True  # whether waiting sequences may start beside running ones

    def __post_init__(self) -> None:
        assert self.max_num_tokens >= 1
