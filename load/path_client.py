"""Closed-loop clients of a running server, over HTTP or over gRPC, with as little work as can be.

    python load/path_client.py http --port 9000 --streams 64 --requests 64 --max-tokens 256

It runs as a process of its own, so that its CPU time can be told from the server's. Over HTTP it is
plain sockets that are kept open; over gRPC it is tritonclient, a stream a request, as a user of
Triton has it. Prints one JSON object, a ``PathResult``.
"""

import asyncio
import contextlib
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
import uvloop
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

MODEL = "smollm2-135m-instruct"
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
    "of",
    "it",
    "all",
]


class PathLoad(msgspec.Struct, frozen=True):
    """``requests`` in all, ``streams`` at a time. ``ids`` prompts are of random token ids."""

    streams: int
    requests: int
    max_tokens: int
    prompt_tokens: int = 16
    stream: bool = True
    ids: bool = False


class PathResult(msgspec.Struct, frozen=True):
    seconds: float
    num_tokens: int
    num_requests: int
    num_failed: int
    cpu_s: float  # of this client
    mean_ms: float
    p99_ms: float
    ttft_p50_ms: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


class Sample(msgspec.Struct):
    """One request: tokens, and seconds to the first of them and to the end."""

    num_tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0


Ask = Callable[[str | list[int]], Awaitable[Sample]]


class HttpClient:
    """One connection, one request at a time."""

    def __init__(self, port: int, load: PathLoad) -> None:
        self._port = port
        self._load = load
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, prompt: str | list[int]) -> Sample:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        reader, writer = self._streams
        started = time.perf_counter()
        writer.write(self._message(prompt))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        sample = Sample()
        if self._load.stream:
            await self._read_events(reader, sample, started)
        else:
            body = await reader.readexactly(_content_length(head))
            sample.num_tokens = msgspec.json.decode(body)["usage"]["completion_tokens"]
        sample.total_s = time.perf_counter() - started
        sample.first_s = sample.first_s or sample.total_s
        return sample

    async def _read_events(
        self, reader: asyncio.StreamReader, sample: Sample, started: float
    ) -> None:
        while True:
            chunk = await reader.readuntil(b"\r\n")
            data = await reader.readexactly(int(chunk, 16) + 2)
            if len(data) == 2:
                return
            sample.first_s = sample.first_s or time.perf_counter() - started
            if b'"usage":{' in data:
                part = data[data.index(b'"completion_tokens":') + 20 :]
                sample.num_tokens = int(part[: part.index(b",")])

    def _message(self, prompt: str | list[int]) -> bytes:
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": self._load.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        if self._load.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        text = msgspec.json.encode(body)
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        ) + text


class GrpcClient:
    """A stream a request over one connection."""

    def __init__(self, client: InferenceServerClient, load: PathLoad) -> None:
        self._client = client
        self._load = load

    async def ask(self, prompt: str | list[int]) -> Sample:
        sample = Sample()
        started = time.perf_counter()
        async for result, error in self._client.stream_infer(self._requests(prompt)):
            if error is not None:
                raise RuntimeError(error.message())
            sample.first_s = sample.first_s or time.perf_counter() - started
            count = result.as_numpy("num_output_tokens")
            sample.num_tokens += int(count[0])
        sample.total_s = time.perf_counter() - started
        return sample

    async def _requests(self, prompt: str | list[int]) -> AsyncIterator[dict[str, Any]]:
        if isinstance(prompt, str):
            inputs = [_string("text_input", prompt)]
        else:
            inputs = [InferInput("input_ids", [len(prompt)], "INT64")]
            inputs[0].set_data_from_numpy(np.array(prompt))
        sampling = {"max_tokens": self._load.max_tokens, "ignore_eos": True, "temperature": 0}
        inputs.append(_string("sampling_parameters", msgspec.json.encode(sampling).decode()))
        inputs.append(_flag("stream", self._load.stream))
        inputs += [_flag(f"return_{n}") for n in ("num_output_tokens", "finish_reason", "error")]
        inputs.append(_flag("exclude_input_in_output"))
        yield {"model_name": MODEL, "inputs": inputs}


def _string(name: str, value: str) -> InferInput:
    tensor = InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def _flag(name: str, value: bool = True) -> InferInput:
    tensor = InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value], dtype=np.bool_))
    return tensor


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    raise RuntimeError("no content-length")


async def _clients(kind: str, port: int, load: PathLoad, stack: Any) -> list[Ask]:
    if kind == "http":
        return [HttpClient(port, load).ask for _ in range(load.streams)]
    client = await stack.enter_async_context(InferenceServerClient(f"127.0.0.1:{port}"))
    return [GrpcClient(client, load).ask for _ in range(load.streams)]


async def run(kind: str, port: int, load: PathLoad, seed: int) -> PathResult:
    """Every client asks again at once, until as many have asked as there are requests."""
    draw = random.Random(seed)
    samples: list[Sample] = []
    left = load.requests
    num_failed = 0

    def prompt() -> str | list[int]:
        if load.ids:
            return draw.choices(range(1000, 40_000), k=load.prompt_tokens)
        return " ".join(draw.choices(WORDS, k=max(1, load.prompt_tokens // 4)))

    async def keep_asking(ask: Ask) -> None:
        nonlocal left, num_failed
        while left > 0:
            left -= 1
            try:
                samples.append(await ask(prompt()))
            except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
                num_failed += 1
                print(repr(error)[:300], file=sys.stderr)

    async with contextlib.AsyncExitStack() as stack:
        asks = await _clients(kind, port, load, stack)
        cpu, started = _cpu_s(), time.perf_counter()
        await asyncio.gather(*(keep_asking(ask) for ask in asks))
        seconds = time.perf_counter() - started
        used = _cpu_s() - cpu
    times = sorted(sample.total_s for sample in samples) or [0.0]
    firsts = sorted(sample.first_s for sample in samples) or [0.0]
    return PathResult(
        seconds,
        sum(sample.num_tokens for sample in samples),
        len(samples),
        num_failed,
        used,
        1000 * sum(times) / len(times),
        1000 * times[int(0.99 * (len(times) - 1))],
        1000 * firsts[len(firsts) // 2],
    )


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(
    kind: Annotated[str, typer.Argument(help="http or grpc")],
    port: int,
    streams: int = 64,
    requests: int = 64,
    max_tokens: int = 256,
    prompt_tokens: int = 16,
    stream: bool = True,
    ids: bool = False,
    seed: int = 0,
) -> None:
    """Ask and print what came of it."""
    load = PathLoad(streams, requests, max_tokens, prompt_tokens, stream, ids)
    result = uvloop.run(run(kind, port, load, seed))
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    typer.run(main)
