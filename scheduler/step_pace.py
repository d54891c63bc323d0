"""How long steps take, learned from the steps that ran."""

from collections.abc import Callable

_MANY_DECODES, _MANY_TOKENS = 16, 64  # of the steps that are tried
_BASE_ROWS = 16.0  # tokens that are taken to cost as much as a step's base, before more is known
_RATE = 0.3  # of a step's surprise that is learned
_SHARE_BESIDE_PROMPTS = 0.25  # that base and decodes learn in a step with prompts
_MOST = 2.0  # times what was expected that a step is believed to have taken
_MANY = 1 << 30


class StepPace:
    """Follows ``seconds = base + a × decodes + b × prompt tokens`` of the latest steps.

    ``measured`` tries a few steps to begin with. From then on a step corrects each part by its
    share in the step (normalised least mean squares). Steps of decodes alone teach ``base`` and
    ``a``; those with prompts teach ``b``, and the others less, or a prompt whose context grows
    would seem to make decodes dear. Nothing drifts where the shapes of the steps do not vary, which
    a regression over the latest steps cannot promise. A step that something else held up is
    believed in part only.
    """

    def __init__(self) -> None:
        self._base = 0.0
        self._decode = 0.0
        self._prompt = 0.0

    @classmethod
    def measured(cls, run: Callable[[int, int], float]) -> "StepPace":
        """From steps that are run for it. ``run`` gets a number of decodes and of prompt tokens,
        and returns the seconds that such a step takes."""
        pace = cls()
        one, many = run(1, 0), run(_MANY_DECODES, 0)
        pace._decode = max(0.0, many - one) / (_MANY_DECODES - 1)
        pace._base = max(0.0, one - pace._decode)
        pace._prompt = max(0.0, run(0, _MANY_TOKENS) - pace._base) / _MANY_TOKENS
        return pace

    def note(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of so many sequences that decode, and tokens of others, took so long."""
        if not self._knows_something:
            row = seconds / (_BASE_ROWS + num_decodes + num_prompt_tokens)
            self._base, self._decode, self._prompt = _BASE_ROWS * row, row, row
            return
        expected = self.seconds(num_decodes, num_prompt_tokens)
        surprise = min(seconds, _MOST * expected) - expected
        share = _SHARE_BESIDE_PROMPTS if num_prompt_tokens else 1.0
        norm = share * (_BASE_ROWS**2 + num_decodes**2) + num_prompt_tokens**2
        gain = _RATE * surprise / norm
        self._base = max(0.0, self._base + gain * share * _BASE_ROWS**2)
        self._decode = max(0.0, self._decode + gain * share * num_decodes)
        self._prompt = max(0.0, self._prompt + gain * num_prompt_tokens)

    def seconds(self, num_decodes: int, num_prompt_tokens: int = 0) -> float:
        """What a step is expected to take."""
        return self._base + self._decode * num_decodes + self._prompt * num_prompt_tokens

    def num_prompt_tokens_in(self, seconds: float, num_decodes: int) -> int:
        """The most prompt tokens beside so many decodes in a step that is over in time; many,
        while nothing is known."""
        if self._prompt <= 0:
            return _MANY
        return max(0, int((seconds - self.seconds(num_decodes)) / self._prompt))

    @property
    def tokens_of_base(self) -> int:
        """Prompt tokens that cost what a step's base costs: with fewer it is mostly overhead."""
        return int(self._base / self._prompt) if self._prompt > 0 else 0

    @property
    def _knows_something(self) -> bool:
        return self.seconds(1, 1) > 0
