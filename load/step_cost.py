"""How long an engine step takes: linear in the shape of the step, fitted to measured step logs."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.scheduler.outputs import ScheduledSequence

FITS_FOLDER = Path(__file__).parent / "fits"
DEFAULT_FIT = FITS_FOLDER / "smollm2-135m-float32-1cpu.json"

_MIN_STEPS = 20
_OUTLIER_FACTOR = 6.0  # times the median error; such steps were disturbed by something else
_NUM_TRIMS = 3

_Matrix = npt.NDArray[np.float64]


@dataclass(slots=True)
class StepShape:
    """What a step's duration depends on."""

    prefill_tokens: int = 0  # of sequences that run more than one token
    decode_seqs: int = 0  # sequences that run one token
    context_tokens: int = 0  # keys that are read: computed and new tokens of every sequence
    prefill_pairs: int = 0  # (query, earlier-or-same key) pairs of the prefill tokens

    def add(self, num_tokens: int, num_computed: int) -> None:
        """Count a sequence that runs ``num_tokens`` after ``num_computed``."""
        self.context_tokens += num_computed + num_tokens
        if num_tokens == 1:
            self.decode_seqs += 1
            return
        self.prefill_tokens += num_tokens
        self.prefill_pairs += num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2

    @classmethod
    def of(cls, scheduled: Iterable[ScheduledSequence]) -> "StepShape":
        """The shape of a step that is about to run."""
        shape = cls()
        for item in scheduled:
            shape.add(item.num_tokens, item.sequence.num_computed_tokens)
        return shape


@dataclass(frozen=True, slots=True)
class StepCost:
    """``t = base + Σ coefficient × count``, all in seconds."""

    base: float
    per_prefill_token: float
    per_decode_seq: float
    per_context_token: float = 0.0
    per_prefill_pair: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes."""
        return (
            self.base
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_decode_seq * shape.decode_seqs
            + self.per_context_token * shape.context_tokens
            + self.per_prefill_pair * shape.prefill_pairs
        )


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class StepCostFit:
    """Coefficients with where they came from. Errors are relative, over all measured steps."""

    cost: StepCost
    num_steps: int
    num_outliers: int  # left out of the fit, not of the errors
    median_error: float
    p90_error: float
    source: str = ""

    def save(self, path: Path) -> None:
        """Write as JSON, one value a line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(self)), indent=2) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "StepCostFit":
        """Read what ``save`` wrote. Raises OSError or ValueError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


class _LoggedSequence(msgspec.Struct):
    num_tokens: int
    num_computed: int


class _LoggedStep(msgspec.Struct):
    """The part of an engine's step log line that the fit needs."""

    worker: int
    time: float
    seqs: list[_LoggedSequence]
    added: list[int]
    aborted: list[int]
    finished: list[int]
    known_ends: list[int] = []


@dataclass(slots=True)
class _WorkerTrack:
    ended: float = 0.0
    live: set[int] = field(default_factory=set)


def read_step_log(path: Path) -> list[MeasuredStep]:
    """The steps of a log whose duration is known.

    The log holds when a step ended. It began when the one before it ended, provided that work was
    left then; the first step after an idle time is left out, and so is one without a forward pass.
    """
    decoder = msgspec.json.Decoder(_LoggedStep)
    tracks: dict[int, _WorkerTrack] = {}
    steps = []
    with path.open("rb") as lines:
        for line in lines:
            logged = decoder.decode(line)
            track = tracks.setdefault(logged.worker, _WorkerTrack())
            if track.live and logged.time > track.ended and not logged.known_ends:
                steps.append(MeasuredStep(_shape_of(logged), logged.time - track.ended))
            track.ended = logged.time
            track.live.update(logged.added)
            track.live.difference_update(logged.finished, logged.aborted)
    return steps


def fit_step_cost(steps: Sequence[MeasuredStep], source: str = "") -> StepCostFit:
    """Least squares of the relative error, with no coefficient below zero.

    Relative, because a decode step matters as much as a prefill step that is ten times longer.
    Steps far off (another process took the CPU) are trimmed. Raises ValueError on too few steps.
    """
    if len(steps) < _MIN_STEPS:
        raise ValueError(f"{len(steps)} measured steps; a fit needs at least {_MIN_STEPS}.")
    features = np.array([_features(step.shape) for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps], dtype=np.float64)
    keep = np.ones(len(steps), dtype=bool)
    for _ in range(_NUM_TRIMS):
        coefficients = _non_negative_least_squares(features[keep] / seconds[keep, None])
        errors = np.abs(features @ coefficients / seconds - 1)
        keep = errors <= _OUTLIER_FACTOR * np.median(errors) + 1e-9
    return StepCostFit(
        StepCost(*(float(value) for value in coefficients)),
        num_steps=len(steps),
        num_outliers=int(len(steps) - keep.sum()),
        median_error=float(np.median(errors)),
        p90_error=float(np.percentile(errors, 90)),
        source=source,
    )


def _shape_of(logged: _LoggedStep) -> StepShape:
    shape = StepShape()
    for sequence in logged.seqs:
        shape.add(sequence.num_tokens, sequence.num_computed)
    return shape


def _features(shape: StepShape) -> tuple[float, ...]:
    """In the order of StepCost's fields."""
    return (
        1.0,
        shape.prefill_tokens,
        shape.decode_seqs,
        shape.context_tokens,
        shape.prefill_pairs,
    )


def _non_negative_least_squares(matrix: _Matrix) -> _Matrix:
    """``x ≥ 0`` with ``matrix @ x ≈ 1``: columns that come out negative are dropped in turn."""
    scales = np.linalg.norm(matrix, axis=0)
    columns = [i for i in range(matrix.shape[1]) if scales[i] > 0]
    solution = np.zeros(matrix.shape[1])
    while columns:
        scaled = matrix[:, columns] / scales[columns]
        values = np.linalg.lstsq(scaled, np.ones(len(matrix)), rcond=None)[0]
        worst = int(np.argmin(values))
        if values[worst] >= 0:
            solution[columns] = values / scales[columns]
            break
        columns.pop(worst)
    return solution
