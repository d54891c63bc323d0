"""Dispatchers, what goes into them and what comes out, for tests."""

from typing import Any

from builders import fake_token, make_sampling

from shoal.scheduler.dispatched import Add, Command, Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.sequence import FinishReason
from shoal.scheduler.worker_ledger import WorkerCapacity

WORKER = 1


def make_dispatcher(max_queued_requests: int = 100, max_replays: int = 3) -> Dispatcher:
    return Dispatcher(DispatcherConfig(max_queued_requests, max_replays))


def make_capacity(
    num_blocks: int = 100, max_num_seqs: int = 8, max_model_len: int | None = None
) -> WorkerCapacity:
    return WorkerCapacity(num_blocks, 16, max_num_seqs, max_model_len or 16 * num_blocks)


def make_ready(num_blocks: int = 100, max_num_seqs: int = 8, max_replays: int = 3) -> Dispatcher:
    dispatcher = make_dispatcher(max_replays=max_replays)
    assert dispatcher.worker_ready(WORKER, make_capacity(num_blocks, max_num_seqs)) == []
    return dispatcher


def add(
    dispatcher: Dispatcher, *seq_ids: int, num_prompt: int = 16, now: float = 0.0, **sampling: Any
) -> None:
    for seq_id in seq_ids:
        params = make_sampling(max_tokens=500, **sampling)
        dispatcher.add(seq_id, [7] * num_prompt, params, now)


def added(commands: list[Command]) -> list[int]:
    """Seq_ids handed over; the commands must be nothing else."""
    assert all(isinstance(command, Add) for command in commands)
    return [command.sequence.seq_id for command in commands if isinstance(command, Add)]


def token(seq_id: int, index: int, reason: FinishReason | None = None) -> StepOutput:
    return StepOutput(seq_id, index, fake_token(seq_id, index), reason)


def give(dispatcher: Dispatcher, *outputs: StepOutput, worker_id: int = WORKER) -> list[Delivery]:
    deliveries = dispatcher.outputs(worker_id, list(outputs), 1.0)
    dispatcher.check_integrity()
    return deliveries
