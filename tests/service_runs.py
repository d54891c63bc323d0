"""A service over scripted workers, and clients of it, for tests."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scripted_worker import ScriptedWorker, ScriptedWorkers
from text_builders import make_tokenizer

from shoal.backend.chunk import Chunk, join_chunks
from shoal.backend.engine_config import EngineConfig
from shoal.backend.intake import RawRequest
from shoal.backend.messages import AbortSequence
from shoal.backend.service import Service, TextParts
from shoal.backend.text.chat_template import ChatTemplate

WAIT_S = 20.0
PROMPT = "hello"  # 5 tokens, one a byte


class Collector:
    """A sink; checks that nothing follows the final chunk."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.ended = threading.Event()
        self.started = threading.Event()
        self.late: list[Chunk] = []

    def __call__(self, chunk: Chunk) -> None:
        if self.ended.is_set():
            self.late.append(chunk)
            return
        self.chunks.append(chunk)
        if chunk.token_ids:
            self.started.set()
        if chunk.final:
            self.ended.set()

    def wait(self) -> Chunk:
        """The whole answer, joined."""
        assert self.ended.wait(WAIT_S), "no final chunk"
        assert not self.late
        return join_chunks(self.chunks)


def request(text: str = PROMPT, **values: Any) -> RawRequest:
    fields = RawRequest.__dataclass_fields__
    raw = {name: values.pop(name) for name in list(values) if name in fields}
    return RawRequest(text_input=text, stream=True, parameters=values, **raw)


def make_service(workers: ScriptedWorkers, **settings: Any) -> Service:
    tokenizer = make_tokenizer()
    text = TextParts(tokenizer, ChatTemplate.from_tokenizer(tokenizer))
    config = EngineConfig(weights="fake", **settings)
    return Service(config, "fake", "1", spawn=workers.spawn, text=text)


@contextmanager
def serving(workers: ScriptedWorkers, **settings: Any) -> Iterator[Service]:
    running = make_service(workers, **settings)
    running.start()
    try:
        yield running
    finally:
        running.stop(0)
    assert all(worker.closed for worker in workers.spawned)


def ask(running: Service, text: str = PROMPT, **values: Any) -> Collector:
    sink = Collector()
    running.submit(request(text, **values), sink)
    return sink


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def aborted(worker: ScriptedWorker) -> list[int]:
    return [m.seq_id for m in worker.received if isinstance(m, AbortSequence)]
