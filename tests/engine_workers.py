"""Workers of a service in its own process, around a real engine with a tiny model."""

import os
from pathlib import Path

from text_builders import EOS, make_tokenizer
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.messages import AbortSequence, AddSequence, FromWorker, StepResults, ToWorker

VOCAB = 272  # padded: the tokenizer has 259


def write_checkpoint(folder: Path) -> Path:
    """A tiny Llama that reads and writes bytes."""
    write_tiny_checkpoint(
        folder,
        max_position_embeddings=1024,
        vocab_size=VOCAB,
        eos_token_id=EOS,
        bos_token_id=EOS - 1,
    )
    (folder / "tokenizer.json").write_text(make_tokenizer().to_json())
    return folder


class EngineWorker:
    """As a worker process, but that it steps when it is asked for its messages.

    In its step ``dies_at`` it dies, before the step's outputs are sent.
    """

    def __init__(self, config: EngineConfig, dies_at: int | None) -> None:
        self._engine, self._ready = build_engine(config, lambda *_: None)
        self._dies_at = dies_at
        self._read, self._write = os.pipe()
        os.write(self._write, b"\0")  # there is always something to receive
        self._is_told = False
        self._alive = True
        self.closed = False
        self.exit_fd = -1
        self.wants_to_write = False
        self.is_over = False
        self.num_steps = 0

    @property
    def socket(self) -> int:
        return self._read

    @property
    def num_preemptions(self) -> int:
        return self._engine.status.num_preemptions

    def start(self) -> None:
        pass

    def send(self, message: ToWorker) -> bool:
        if isinstance(message, AddSequence):
            self._engine.add(message)
        elif isinstance(message, AbortSequence):
            self._engine.abort(message.seq_id)
        return True

    def receive(self, timeout_ms: int = 0) -> list[FromWorker]:
        if not self._alive:
            return []
        if not self._is_told:
            self._is_told = True
            return [self._ready, self._engine.status]
        if not self._engine.has_unfinished:
            return [self._engine.status]
        self.num_steps += 1
        outputs = self._engine.step()
        if self.num_steps == self._dies_at:
            self._alive = False
            return []
        return [StepResults(outputs, self._engine.status)]

    def is_alive(self) -> bool:
        return self._alive

    def describe_exit(self) -> str:
        return "killed by SIGKILL"

    def kill(self) -> None:
        self._alive = False

    def close(self) -> None:
        self._alive = False
        if not self.closed:
            self.closed = True
            os.close(self._read)
            os.close(self._write)


class EngineWorkers:
    """Spawns them, one after another. ``deaths``: the step in which each of the first ones dies."""

    def __init__(self, config: EngineConfig, deaths: tuple[int, ...] = ()) -> None:
        self._config, self._deaths = config, list(deaths)
        self.spawned: list[EngineWorker] = []

    def spawn(self) -> EngineWorker:
        dies_at = self._deaths.pop(0) if self._deaths else None
        self.spawned.append(EngineWorker(self._config, dies_at))
        return self.spawned[-1]
