"""What every engine step did, as one JSON line a step: for tests and for questions afterwards."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.backend.engine_config import ConfigError
from shoal.scheduler.outputs import Preemption, SchedulerOutput, StepOutput


class StepSequence(msgspec.Struct, frozen=True):
    """One scheduled sequence; lengths in tokens, before the step's sampled token."""

    seq_id: int
    num_tokens: int  # run in this step
    num_computed: int  # before this step
    prompt: int
    samples: bool


class StepPreemption(msgspec.Struct, frozen=True):
    """How a preempted sequence comes back, and what the ways would cost."""

    seq_id: int
    way: str  # cached, checkpoint or recompute
    num_tokens: int  # computed ones that it lost
    copy_ms: float | None  # None: there was no host memory for it
    recompute_ms: float


class StepRestored(msgspec.Struct, frozen=True):
    """What a sequence got from the host instead of computing it."""

    seq_id: int
    way: str  # checkpoint, or cached: a prefix
    num_tokens: int


class StepRecord(msgspec.Struct, frozen=True):
    """One line. ``added`` and ``aborted`` are what arrived since the line before."""

    worker: int  # process id: steps count from 1 in each worker
    step: int
    time: float  # Unix time at which the step ended
    seqs: list[StepSequence]
    added: list[int]
    aborted: list[int]
    preempted: list[int]
    finished: list[int]
    free_blocks: int
    preemptions: list[StepPreemption] = []
    restored: list[StepRestored] = []
    known_ends: list[int] = []  # for which no forward pass ran


class StepLog:
    """Appends to a file, flushed after each line. Raises ConfigError where it cannot."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"step_log: {path.name} cannot be written: {error.strerror}."
            ) from error
        self._encoder = msgspec.json.Encoder()
        self._added: list[int] = []
        self._aborted: list[int] = []
        self._planned: list[StepSequence] = []

    def added(self, seq_id: int) -> None:
        self._added.append(seq_id)

    def aborted(self, seq_id: int) -> None:
        self._aborted.append(seq_id)

    def planned(self, output: SchedulerOutput) -> None:
        """Note a step before its results change the sequences."""
        self._planned = [
            StepSequence(
                item.sequence.seq_id,
                item.num_tokens,
                item.sequence.num_computed_tokens,
                item.sequence.num_prompt_tokens,
                item.samples,
            )
            for item in output.scheduled
        ]

    def finished(
        self,
        step: int,
        output: SchedulerOutput,
        results: list[StepOutput],
        free_blocks: int,
        known_ends: Iterable[int] = (),
    ) -> None:
        """Write the line of the step noted last."""
        record = StepRecord(
            worker=os.getpid(),
            step=step,
            time=time.time(),
            seqs=self._planned,
            added=self._added,
            aborted=self._aborted,
            preempted=list(output.preempted),
            finished=[result.seq_id for result in results if result.finish_reason],
            free_blocks=free_blocks,
            preemptions=[_preemption(item) for item in output.preemptions],
            restored=[
                StepRestored(item.seq_id, item.way.value, item.num_tokens)
                for item in output.restored
            ],
            known_ends=list(known_ends),
        )
        self._added, self._aborted, self._planned = [], [], []
        self._file.write(self._encoder.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _preemption(preemption: Preemption) -> StepPreemption:
    plan = preemption.plan
    copy_ms = None if plan.copy_s is None else round(1000 * plan.copy_s, 3)
    recompute_ms = round(1000 * plan.recompute_s, 3)
    return StepPreemption(preemption.seq_id, plan.way.value, plan.num_tokens, copy_ms, recompute_ms)
