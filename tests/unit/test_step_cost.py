"""What a step costs, fitted to what a worker logged."""

import random
from pathlib import Path

import msgspec
import pytest

from shoal.backend.step_log import StepRecord, StepSequence
from shoal.load.step_cost import (
    DEFAULT_FIT,
    MeasuredStep,
    StepCost,
    StepCostFit,
    StepShape,
    fit_step_cost,
    read_step_log,
)


def random_steps(cost: StepCost, num_steps: int, seed: int = 0) -> list[MeasuredStep]:
    choose = random.Random(seed)
    steps = []
    for _ in range(num_steps):
        shape = StepShape()
        for _ in range(choose.randint(0, 40)):
            shape.add(1, choose.randint(1, 2000))
        for _ in range(choose.randint(0, 3)):
            shape.add(choose.randint(2, 250), choose.randint(0, 1000))
        steps.append(MeasuredStep(shape, cost.seconds(shape)))
    return steps


def coefficients(cost: StepCost) -> list[float]:
    return [getattr(cost, name) for name in StepCost.__slots__]


def test_fit_recovers_known_coefficients() -> None:
    cost = StepCost(0.03, 8e-4, 2e-3, 3e-6, 4e-9)
    fitted = fit_step_cost(random_steps(cost, 300))
    assert coefficients(fitted.cost) == pytest.approx(coefficients(cost), rel=1e-6)
    assert fitted.num_outliers == 0
    assert fitted.p90_error < 1e-6


def test_fit_ignores_disturbed_steps_and_never_goes_below_zero() -> None:
    cost = StepCost(0.03, 8e-4, 2e-3)
    noise = random.Random(1)
    steps = [
        MeasuredStep(s.shape, s.seconds * (10 if i % 50 == 0 else noise.uniform(0.98, 1.02)))
        for i, s in enumerate(random_steps(cost, 400))
    ]
    fitted = fit_step_cost(steps)
    assert fitted.num_outliers >= 8
    assert fitted.cost.base == pytest.approx(cost.base, rel=0.05)
    assert fitted.cost.per_prefill_token == pytest.approx(cost.per_prefill_token, rel=0.05)
    assert fitted.cost.per_decode_seq == pytest.approx(cost.per_decode_seq, rel=0.05)
    assert min(coefficients(fitted.cost)) >= 0


def test_fit_needs_steps() -> None:
    with pytest.raises(ValueError, match="at least"):
        fit_step_cost([])


def write_log(path: Path, records: list[StepRecord]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path


def logged(
    time: float, *seqs: tuple[int, int], added: tuple[int, ...] = (), finished: tuple[int, ...] = ()
) -> StepRecord:
    """A step of sequences (num_tokens, num_computed)."""
    sequences = [
        StepSequence(i, num_tokens, computed, 5, True)
        for i, (num_tokens, computed) in enumerate(seqs)
    ]
    return StepRecord(7, 1, time, sequences, list(added), [], [], list(finished), 9)


def test_step_log_gives_the_time_between_busy_steps(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "steps.jsonl",
        [
            logged(10.0, (5, 0), added=(0,)),  # when it began is not known
            logged(10.5, (1, 5), (4, 8), added=(1,), finished=(0, 1)),
            logged(99.0, (5, 0), added=(2,)),  # after an idle time
            logged(99.25, (1, 5)),
            msgspec.structs.replace(logged(99.3, (1, 5), added=(3,)), known_ends=[3]),
            logged(99.75, (1, 6), finished=(2, 3)),
        ],
    )
    steps = read_step_log(log)
    assert [round(step.seconds, 3) for step in steps] == [0.5, 0.25, 0.45]  # but of forward passes
    assert steps[0].shape == StepShape(
        prefill_tokens=4, decode_seqs=1, context_tokens=6 + 12, prefill_pairs=9 + 10 + 11 + 12
    )


def test_the_committed_fit_loads_and_says_where_it_is_from(tmp_path: Path) -> None:
    fitted = StepCostFit.load(DEFAULT_FIT)
    assert fitted.source
    assert fitted.cost.base > 0
    fitted.save(tmp_path / "fit.json")
    assert StepCostFit.load(tmp_path / "fit.json") == fitted
