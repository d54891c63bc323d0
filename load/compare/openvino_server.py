"""OpenVINO GenAI's continuous batching behind /v1/completions: the thinnest server it can have.

    python openvino_server.py IR_FOLDER PORT [INFERENCE_PRECISION]

Runs in OpenVINO's own environment and imports nothing of this project. One thread steps the
pipeline, one event loop talks HTTP.
"""

import asyncio
import json
import queue
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from tokenizers import Tokenizer

HAND_OVER_S = 0.05  # the longest that the step loop waits for the event loop

Delta = tuple[list[int], bool]  # new tokens, and whether they are the last


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way to the pipeline, and where its tokens go."""

    token_ids: list[int]
    config: Any
    deltas: "asyncio.Queue[Delta]"
    handle: Any = None


class Engine:
    """Owns the pipeline; ``run`` is its thread."""

    def __init__(self, folder: str, precision: str, loop: asyncio.AbstractEventLoop) -> None:
        """``precision``: bf16, f32; empty for what OpenVINO takes by itself."""
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 4  # GB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": 2}
        if precision:
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._loop = loop
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._running: list[Request] = []
        self._handed_over = threading.Event()
        self._next_id = 0

    def add(self, request: Request) -> None:
        """Called by the event loop."""
        self._waiting.put(request)

    def run(self) -> None:
        """Step for ever."""
        while True:
            self._take_requests()
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            if batch := self._take_tokens():
                # step() keeps the interpreter's lock: without this the tokens of one step would
                # leave only after the next.
                self._handed_over.clear()
                self._loop.call_soon_threadsafe(self._deliver, batch)
                self._handed_over.wait(HAND_OVER_S)

    def _take_requests(self) -> None:
        while not self._running or not self._waiting.empty():
            request = self._waiting.get()
            prompt = openvino.Tensor(np.array([request.token_ids], dtype=np.int64))
            request.handle = self._pipeline.add_request(self._next_id, prompt, request.config)
            self._next_id += 1
            self._running.append(request)

    def _take_tokens(self) -> list[tuple[Request, Delta]]:
        batch = []
        still_running = []
        for request in self._running:
            tokens: list[int] = []
            while request.handle.can_read():
                for output in request.handle.read().values():
                    tokens += list(output.generated_ids)
            is_last = request.handle.get_status() != genai.GenerationStatus.RUNNING
            if tokens or is_last:
                batch.append((request, (tokens, is_last)))
            if not is_last:
                still_running.append(request)
        self._running = still_running
        return batch

    def _deliver(self, batch: list[tuple[Request, Delta]]) -> None:
        for request, delta in batch:
            request.deltas.put_nowait(delta)
        # Twice, so that it comes after the handlers that were woken have written.
        self._loop.call_soon(lambda: self._loop.call_soon(self._handed_over.set))


class Server:
    """Answers completions as server-sent events."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/health" in head.split(b"\r\n", 1)[0]:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
                return
            body = json.loads(await reader.readexactly(content_length(head)))
            await self._complete(body, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        token_ids = self._tokenizer.encode(body["prompt"]).ids
        request = Request(token_ids, generation_config(body), asyncio.Queue())
        self._engine.add(request)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        count, is_last = 0, False
        while not is_last:
            tokens, is_last = await request.deltas.get()
            count += len(tokens)
            if tokens:
                text = self._tokenizer.decode(tokens, skip_special_tokens=False) or " "
                writer.write(event({"choices": [{"index": 0, "text": text}]}))
        usage = {"prompt_tokens": len(token_ids), "completion_tokens": count}
        writer.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")


def generation_config(body: dict[str, Any]) -> Any:
    config = genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = body["max_tokens"]
    config.ignore_eos = bool(body.get("ignore_eos"))
    config.min_new_tokens = body.get("min_tokens") or 0
    return config


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


async def main() -> None:
    folder, port = sys.argv[1], int(sys.argv[2])
    precision = sys.argv[3] if len(sys.argv) > 3 else ""
    engine = Engine(folder, precision, asyncio.get_running_loop())
    threading.Thread(target=engine.run, daemon=True).start()
    service = Server(engine, Tokenizer.from_file(f"{folder}/tokenizer.json"))
    server = await asyncio.start_server(service.handle, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
