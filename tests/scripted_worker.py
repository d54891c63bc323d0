"""A worker without a process or a model, behind the interface that the keeper uses."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.backend.messages import (
    AbortSequence,
    AddSequence,
    FromWorker,
    LoadFailed,
    LoadProgress,
    StepResults,
    ToWorker,
    WorkerReady,
    WorkerStatus,
)
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.sequence import FinishReason

BLOCK_SIZE = 4
STEP_S = 0.0005  # so that what a test does meanwhile comes before hundreds of steps


def scripted_token_id(num_prompt_tokens: int, output_index: int) -> int:
    """A lower-case letter that depends on nothing else, so that a replay gives the same text."""
    return ord("a") + (num_prompt_tokens + output_index) % 26


def scripted_text(num_prompt_tokens: int, num_tokens: int) -> str:
    return "".join(chr(scripted_token_id(num_prompt_tokens, i)) for i in range(num_tokens))


@dataclass
class WorkerScript:
    """How a worker behaves. ``die_on`` is asked at each step, before its outputs are sent."""

    num_blocks: int = 1000
    max_num_seqs: int = 8
    max_model_len: int = 512
    load_error: str | None = None
    dies_loading: bool = False
    silent: bool = False
    die_on: Callable[["ScriptedWorker"], bool] = lambda worker: False
    fail_on: Callable[[AddSequence], bool] = lambda message: False
    fault: str | None = None  # the request's field that is at fault of a failure


@dataclass
class ScriptedWorker:
    """Gives every live sequence one token a step, and steps only while ``running`` is set."""

    script: WorkerScript
    running: threading.Event
    sequences: dict[int, AddSequence] = field(default_factory=dict)
    num_outputs: dict[int, int] = field(default_factory=dict)
    received: list[ToWorker] = field(default_factory=list)
    alive: bool = True
    closed: bool = False
    killed: bool = False
    num_steps: int = 0
    num_receives: int = 0
    exit_fd: int = -1
    wants_to_write: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self._read, self._write = os.pipe()
        os.write(self._write, b"\0")  # there is always something to receive

    @property
    def socket(self) -> int:
        return self._read

    def start(self) -> None:
        pass

    def send(self, message: ToWorker) -> bool:
        assert self.alive
        self.received.append(message)
        if isinstance(message, AddSequence):
            self.sequences[message.seq_id] = message
            self.num_outputs[message.seq_id] = len(message.token_ids) - message.num_prompt_tokens
        elif isinstance(message, AbortSequence):
            self.sequences.pop(message.seq_id, None)
        return True

    def receive(self, timeout_ms: int = 0) -> list[FromWorker]:
        self.num_receives += 1
        if not self.alive:
            return []
        if self.num_receives == 1:
            return self._load()
        if self.script.silent:
            return []
        if not self.running.is_set() or not self.sequences:
            return [self.status]
        return self._step()

    def _load(self) -> list[FromWorker]:
        if self.script.dies_loading:
            self.alive = False
            return []
        if self.script.load_error:
            return [LoadProgress("weights", 1, 2), LoadFailed(self.script.load_error)]
        ready = WorkerReady(
            num_blocks=self.script.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.script.max_num_seqs,
            max_model_len=self.script.max_model_len,
            vocab_size=259,
            eos_token_ids=[257],
            dtype="float32",
            device="cpu",
        )
        return [LoadProgress("weights", 1, 2), ready, self.status]

    def _step(self) -> list[FromWorker]:
        time.sleep(STEP_S)
        self.num_steps += 1
        if self.script.die_on(self):
            self.alive = False
            return []
        outputs = [self._output(message) for message in list(self.sequences.values())]
        return [StepResults(outputs, self.status)]

    def _output(self, message: AddSequence) -> StepOutput:
        seq_id, index = message.seq_id, self.num_outputs[message.seq_id]
        if self.script.fail_on(message):
            del self.sequences[seq_id]
            fault = self.script.fault
            return StepOutput(
                seq_id, index, None, FinishReason.ERROR, error="It failed.", error_param=fault
            )
        self.num_outputs[seq_id] += 1
        finished = index + 1 == message.sampling.max_tokens
        if finished:
            del self.sequences[seq_id]
        token_id = scripted_token_id(message.num_prompt_tokens, index)
        wanted = message.sampling.logprobs
        token = SampledToken(
            token_id,
            logprob=None if wanted is None else -0.5,
            top_logprobs=tuple((token_id + i, -0.5 - i) for i in range(wanted or 0)),
        )
        return StepOutput(seq_id, index, token, FinishReason.LENGTH if finished else None)

    @property
    def status(self) -> WorkerStatus:
        used = sum(
            (message.num_prompt_tokens + self.num_outputs[seq_id]) // BLOCK_SIZE + 1
            for seq_id, message in self.sequences.items()
        )
        return WorkerStatus(
            step=self.num_steps,
            free_blocks=self.script.num_blocks - used,
            num_running=len(self.sequences),
            num_waiting=0,
            num_preemptions=0,
        )

    def is_alive(self) -> bool:
        return self.alive

    def describe_exit(self) -> str:
        return "killed by SIGKILL"

    def kill(self) -> None:
        self.alive = False
        self.killed = True

    def close(self) -> None:
        self.alive = False
        if not self.closed:
            self.closed = True
            os.close(self._read)
            os.close(self._write)


class ScriptedWorkers:
    """Spawns workers: the nth by the nth script, further ones by the last; all pause together."""

    def __init__(self, *scripts: WorkerScript) -> None:
        self._scripts = scripts or (WorkerScript(),)
        self.running = threading.Event()
        self.running.set()
        self.spawned: list[ScriptedWorker] = []

    def spawn(self) -> ScriptedWorker:
        script = self._scripts[min(len(self.spawned), len(self._scripts) - 1)]
        self.spawned.append(ScriptedWorker(script, self.running))
        return self.spawned[-1]

    @property
    def last(self) -> ScriptedWorker:
        return self.spawned[-1]
