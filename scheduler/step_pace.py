"""How long a step of so many tokens takes, learned from the steps that ran."""

_DECAY = 0.98  # of a step's weight, a step
_MIN_STEPS = 4.0  # weight of evidence under which nothing is said
_MANY = 1 << 30


class StepPace:
    """Least squares of ``seconds = base + rate × tokens``, over the latest steps."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._tokens_squared = 0.0
        self._product = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._weight = _DECAY * self._weight + 1
        self._tokens = _DECAY * self._tokens + num_tokens
        self._seconds = _DECAY * self._seconds + seconds
        self._tokens_squared = _DECAY * self._tokens_squared + num_tokens**2
        self._product = _DECAY * self._product + num_tokens * seconds

    def num_tokens_in(self, seconds: float) -> int:
        """The most tokens of a step that is over in time; many, while nothing is known."""
        if self._weight < _MIN_STEPS:
            return _MANY
        base, rate = self._line()
        if rate <= 0:
            return _MANY
        return max(0, int((seconds - base) / rate))

    @property
    def tokens_of_base(self) -> int:
        """Tokens that take as long as a step's base: a step with fewer is mostly overhead."""
        if self._weight < _MIN_STEPS:
            return 0
        base, rate = self._line()
        return int(base / rate) if rate > 0 else _MANY

    def _line(self) -> tuple[float, float]:
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        covariance = self._product / self._weight - mean_tokens * mean_seconds
        if variance < 1 or covariance <= 0:
            # Steps of one size say nothing of the base: no base, so rather too few tokens.
            return 0.0, mean_seconds / max(1.0, mean_tokens)
        rate = covariance / variance
        base = mean_seconds - rate * mean_tokens
        return (base, rate) if base > 0 else (0.0, mean_seconds / mean_tokens)
