"""How likely blocks are used again, and how soon: a hazard model learned online.

Time since the last use is cut into ages of growing length. For each age the model estimates the
chance that a run which got that old is used before it gets older: a logistic regression over the
run's features, trained on every run as it passes from one age to the next (not used) or is used.
So never-used blocks teach as much as used ones, and nothing waits for an eviction.
"""

from bisect import bisect_right
from collections import deque
from math import exp, inf, log, sqrt
from typing import Protocol


class Reusable(Protocol):
    """What the model needs to know of a run; it writes nothing."""

    num_blocks: int
    num_uses: int
    last_used: float
    features: tuple[int, ...]


PHASES_S = (40.0, 150.0, 500.0)  # features weigh differently while reading, replying, away
NUM_PHASES = len(PHASES_S) + 1

_Open = tuple[float, Reusable, int]  # clock time of a use, the run, its number of uses then


class ReuseModel:
    """Hits that a block should give per second of being kept, given its age and features."""

    FIRST_AGE_S = 2.0
    AGE_GROWTH = 1.3
    NUM_AGES = 30  # the last one begins after about an hour
    LEARNING_RATE = 0.2
    FIRST_GUESS = 0.05  # chance of a use within one age, before anything is known
    MAX_RUN_WEIGHT = 10  # one long document must not outweigh many short runs
    ROW_LIFETIME = 100  # uses after which a computed row of densities is computed again
    ADVANCE_EVERY_S = 0.5
    MAX_ROWS = 4096

    def __init__(self, max_open: int = 1 << 17) -> None:
        self.edges = [0.0]  # age k lasts from edges[k] to edges[k + 1]
        for age in range(self.NUM_AGES):
            self.edges.append(self.FIRST_AGE_S * self.AGE_GROWTH**age)
        self._widths = [end - start for start, end in zip(self.edges, self.edges[1:], strict=False)]
        self._phases = [bisect_right(PHASES_S, edge) for edge in self.edges[:-1]]
        self._bias = [log(self.FIRST_GUESS / (1 - self.FIRST_GUESS))] * self.NUM_AGES
        self._bias_energy = [1.0] * self.NUM_AGES  # sums of squared gradients, as in AdaGrad
        self._terms: dict[int, list[float]] = {}  # see _terms_of
        self._open: list[deque[_Open]] = [deque() for _ in range(self.NUM_AGES)]
        self._num_open = 0
        self._advanced_at = -inf
        self._max_open = max_open
        self._num_uses = 0
        self._rows: dict[tuple[int, ...], tuple[int, list[float]]] = {}

    def begin(self, usage: Reusable, now: float) -> None:
        """The run was used at `now`: follow it until it is used again or gets too old."""
        self._advance(now)
        self._num_uses += 1
        self._num_open += 1
        self._open[0].append((now, usage, usage.num_uses))
        if self._num_open > self._max_open:
            next(queue for queue in reversed(self._open) if queue).popleft()
            self._num_open -= 1

    def returned(self, usage: Reusable, now: float) -> None:
        """The run is used again; its fields still describe the use before."""
        self._advance(now)
        self._learn(usage, self._age_of(now - usage.last_used), 1.0)

    def hit_density(self, usage: Reusable, now: float) -> tuple[float, float]:
        """Expected hits per block and second, and the clock time at which that changes."""
        age = self._age_of(now - usage.last_used)
        entry = self._rows.get(usage.features)
        if entry is None or self._num_uses - entry[0] > self.ROW_LIFETIME:
            if len(self._rows) >= self.MAX_ROWS:
                self._rows.clear()
            entry = (self._num_uses, self._density_row(usage.features))
            self._rows[usage.features] = entry
        is_last = age + 1 == self.NUM_AGES
        return entry[1][age], inf if is_last else usage.last_used + self.edges[age + 1]

    def _age_of(self, seconds: float) -> int:
        return min(max(bisect_right(self.edges, seconds), 1), self.NUM_AGES) - 1

    def _advance(self, now: float) -> None:
        """Learn from every run that passed into the next age unused."""
        if now - self._advanced_at < self.ADVANCE_EVERY_S:
            return
        self._advanced_at = now
        for age in range(self.NUM_AGES):
            queue = self._open[age]
            latest = now - self.edges[age + 1]
            while queue and queue[0][0] <= latest:
                entry = queue.popleft()
                _, usage, num_uses = entry
                if usage.num_uses != num_uses or usage.num_blocks <= 0:
                    self._num_open -= 1
                    continue
                self._learn(usage, age, 0.0)
                if age + 1 < self.NUM_AGES:
                    self._open[age + 1].append(entry)
                else:
                    self._num_open -= 1

    def _learn(self, usage: Reusable, age: int, outcome: float) -> None:
        """One AdaGrad step of logistic regression."""
        phase = self._phases[age]
        slot = phase + NUM_PHASES
        terms = [self._terms_of(feature) for feature in usage.features]
        logit = self._bias[age]
        for term in terms:
            logit += term[phase]
        weight = min(usage.num_blocks, self.MAX_RUN_WEIGHT) / 2
        gradient = (outcome - _logistic(logit)) * weight
        square = gradient * gradient
        step = self.LEARNING_RATE * gradient
        self._bias_energy[age] += square
        self._bias[age] += step / sqrt(self._bias_energy[age])
        for term in terms:
            term[slot] += square
            term[phase] += step / sqrt(term[slot])

    def _terms_of(self, feature: int) -> list[float]:
        """Weights by phase, then their gradients' energies by phase."""
        term = self._terms.get(feature)
        if term is None:
            term = self._terms[feature] = [0.0] * NUM_PHASES + [1.0] * NUM_PHASES
        return term

    def _density_row(self, features: tuple[int, ...]) -> list[float]:
        terms = [self._terms_of(feature) for feature in features]
        sums = [sum(term[phase] for term in terms) for phase in range(NUM_PHASES)]
        chances = [
            _logistic(bias + sums[phase])
            for bias, phase in zip(self._bias, self._phases, strict=True)
        ]
        before, after = [chances[0], *chances[:-1]], [*chances[1:], chances[-1]]
        smooth = [
            (left + 2 * middle + right) / 4
            for left, middle, right in zip(before, chances, after, strict=True)
        ]
        known = [age for age in range(self.NUM_AGES) if self._bias_energy[age] > 3.0]
        peak = max(known, key=lambda age: smooth[age] / self._widths[age], default=0)
        return _best_densities(self._falling_after(smooth, peak), self._widths, peak)

    def _falling_after(self, chances: list[float], peak: int) -> list[float]:
        """Past the likeliest moment, longer silence never makes a use likelier (isotonic fit)."""
        rates = [
            chance / (width * (1.0 - chance / 2))
            for chance, width in zip(chances, self._widths, strict=True)
        ]
        pools: list[tuple[float, float, int]] = []  # rate, width, ages
        for rate, width in zip(rates[peak:], self._widths[peak:], strict=True):
            pool = (rate, width, 1)
            while pools and pools[-1][0] <= pool[0]:
                pool = _merged(pools.pop(), pool)
            pools.append(pool)
        fitted = chances[:peak]
        for rate, _, ages in pools:
            for _ in range(ages):
                uses = rate * self._widths[len(fitted)]
                fitted.append(uses / (1.0 + uses / 2))
        return fitted


def _merged(
    left: tuple[float, float, int], right: tuple[float, float, int]
) -> tuple[float, float, int]:
    width = left[1] + right[1]
    rate = (left[0] * left[1] + right[0] * right[1]) / width
    return rate, width, left[2] + right[2]


def _best_densities(chances: list[float], widths: list[float], peak: int) -> list[float]:
    """For each age: the best ratio, over all times to stop waiting, of hits to time kept.

    Chances per second only fall after `peak`: where the ratio falls there, it has turned for good.
    """
    row = []
    for start in range(len(chances)):
        alive, hits, kept, best = 1.0, 0.0, 0.0, 0.0
        for age in range(start, len(chances)):
            chance = chances[age]
            hits += alive * chance
            kept += alive * widths[age] * (1.0 - chance / 2)
            if hits > best * kept:
                best = hits / kept
            elif age > peak:
                break
            alive *= 1.0 - chance
        row.append(best)
    return row


def _logistic(logit: float) -> float:
    return 1.0 / (1.0 + exp(-max(-30.0, min(30.0, logit))))
