"""The real worker process around a fake engine: it starts at once, since it imports no torch.

Run as ``WorkerProcess(config, module="fake_worker", env={"PYTHONPATH": tests folder})``.
The engine gives every sequence its prompt's last id plus one, two, … until max_tokens.
"""

import sys

from shoal.backend import worker
from shoal.backend.messages import AddSequence, WorkerReady, WorkerStatus
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.sequence import FinishReason

NUM_BLOCKS = 100


class FakeEngine:
    def __init__(self) -> None:
        self._live: dict[int, AddSequence] = {}
        self._num_outputs: dict[int, int] = {}
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    @property
    def made_progress(self) -> bool:
        return True

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(self._num_steps, NUM_BLOCKS - len(self._live), len(self._live), 0, 0)

    def add(self, message: AddSequence) -> None:
        self._live[message.seq_id] = message
        self._num_outputs[message.seq_id] = len(message.token_ids) - message.num_prompt_tokens

    def abort(self, seq_id: int) -> None:
        self._live.pop(seq_id, None)

    def rest(self) -> None:
        pass

    def step(self) -> list[StepOutput]:
        self._num_steps += 1
        return [self._advance(message) for message in list(self._live.values())]

    def _advance(self, message: AddSequence) -> StepOutput:
        index = self._num_outputs[message.seq_id]
        self._num_outputs[message.seq_id] += 1
        token = SampledToken(message.token_ids[message.num_prompt_tokens - 1] + 1 + index)
        if index + 1 < (message.sampling.max_tokens or 1):
            return StepOutput(message.seq_id, index, token)
        del self._live[message.seq_id]
        return StepOutput(message.seq_id, index, token, FinishReason.LENGTH)


def _load(link: worker.ParentLink, config: object) -> tuple[FakeEngine, WorkerReady]:
    ready = WorkerReady(NUM_BLOCKS, 16, 8, 1024, 50_000, [2], "float32", "cpu")
    return FakeEngine(), ready


if __name__ == "__main__":
    worker._load = _load  # type: ignore[assignment]
    sys.exit(worker.main())
