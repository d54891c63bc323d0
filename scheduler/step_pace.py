"""How long steps take, learned from the steps that ran."""

import math
from collections.abc import Callable

_MANY_DECODES, _MANY_TOKENS, _LONG_CONTEXT = 16, 64, 1024  # of the steps that are tried
_BASE_ROWS = 16.0  # tokens that are taken to cost as much as a step's base, before more is known
_RATE = 0.3  # of a step's surprise that is learned
_SHARE_BESIDE_PROMPTS = 0.25  # that base and decodes learn in a step with prompts
_MOST = 2.0  # times what was expected that a step is believed to have taken


class StepPace:
    """Follows ``seconds = base + a × decodes + b × prompt work`` of the latest steps.

    The work of a prompt's token is 1 without context, and 2 where the context costs as much again.

    ``measured`` tries a few steps to begin with. From then on a step corrects each part by its
    share in the step (normalised least mean squares). Steps of decodes alone teach ``base`` and
    ``a``; those with prompts teach ``b``, and the others less, or a prompt whose context grows
    would seem to make decodes dear. Nothing drifts where the shapes of the steps do not vary, which
    a regression over the latest steps cannot promise. A step that something else held up is
    believed in part only.
    """

    def __init__(self) -> None:
        self._context = math.inf  # that makes a token's work 2
        self._base = 0.0
        self._decode = 0.0
        self._prompt = 0.0

    @classmethod
    def measured(
        cls, run: Callable[[int, int, int], float], most_tokens: int = _MANY_TOKENS + _LONG_CONTEXT
    ) -> "StepPace":
        """From steps that are run for it. ``run`` gets a number of decodes, of prompt tokens, and
        of those that are computed before these; it returns the seconds that such a step takes.
        ``most_tokens``: that a sequence may have."""
        pace = cls()
        one, many = run(1, 0, 0), run(_MANY_DECODES, 0, 0)
        pace._decode = max(0.0, many - one) / (_MANY_DECODES - 1)
        pace._base = max(0.0, one - pace._decode)
        num_tokens = min(_MANY_TOKENS, most_tokens)
        context = min(_LONG_CONTEXT, most_tokens - num_tokens)
        near, far = run(0, num_tokens, 0), run(0, num_tokens, context)
        pace._prompt = max(0.0, near - pace._base) / num_tokens
        if far > near and pace._prompt:
            pace._context = context * pace._prompt * num_tokens / (far - near)
        return pace

    def work_of_token(self, num_computed: int) -> float:
        """Of a prompt's token after so many others."""
        return 1 + num_computed / self._context

    def note(self, num_decodes: int, prompt_work: float, seconds: float) -> None:
        """A step of so many sequences that decode, and work on others' prompts, took so long."""
        if not self._knows_something:
            row = seconds / (_BASE_ROWS + num_decodes + prompt_work)
            self._base, self._decode, self._prompt = _BASE_ROWS * row, row, row
            return
        expected = self.seconds(num_decodes, prompt_work)
        surprise = min(seconds, _MOST * expected) - expected
        share = _SHARE_BESIDE_PROMPTS if prompt_work else 1.0
        norm = share * (_BASE_ROWS**2 + num_decodes**2) + prompt_work**2
        gain = _RATE * surprise / norm
        self._base = max(0.0, self._base + gain * share * _BASE_ROWS**2)
        self._decode = max(0.0, self._decode + gain * share * num_decodes)
        self._prompt = max(0.0, self._prompt + gain * prompt_work)

    def seconds(self, num_decodes: int, prompt_work: float = 0) -> float:
        """What a step is expected to take."""
        return self._base + self._decode * num_decodes + self._prompt * prompt_work

    def prompt_work_in(self, seconds: float, num_decodes: int) -> float:
        """The most work on prompts beside so many decodes in a step that is over in time; infinite
        while nothing is known."""
        if self._prompt <= 0:
            return math.inf
        return max(0.0, (seconds - self.seconds(num_decodes)) / self._prompt)

    @property
    def tokens_of_base(self) -> int:
        """Prompt tokens that cost what a step's base costs: with fewer it is mostly overhead."""
        return int(self._base / self._prompt) if self._prompt > 0 else 0

    @property
    def _knows_something(self) -> bool:
        return self.seconds(1, 1) > 0
