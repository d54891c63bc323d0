"""Requests to a running server's OpenAI endpoint, with the least work a client can do for them.

Client and server share the machine, so a client that parses much would measure itself.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

VOCAB = range(1000, 40_000)
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A completion of ``text``, or of random tokens. ``at``: seconds from the start of the load."""

    at: float
    num_prompt: int
    num_outputs: int
    tenant: str = ""
    slo_class: str = ""
    text: str = ""


@dataclass(slots=True, eq=False)
class LiveRecord:
    """What came of one request. Times are seconds from the start of the load."""

    request: LiveRequest
    message: bytes = b""  # as it is sent; empty: to be made then
    sent: float = 0.0  # of the first try
    status: int = 0  # of the last try; 0: no answer
    first_token: float | None = None
    token_times: list[float] = field(default_factory=list)  # one an event; an event may hold more
    num_tokens: int = 0
    ended: float | None = None
    refused: list[tuple[float, float, float]] = field(default_factory=list)
    """Each refusal: when it was sent, when it was answered, the wait that was told."""

    @property
    def is_finished(self) -> bool:
        return self.status == 200 and self.ended is not None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.sent


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class LiveClient:
    """Sends open-loop load: each request at its time, whatever became of those before.

    Connections are kept and used again, as the official clients do.
    """

    def __init__(self, port: int, model: str, seed: int = 0) -> None:
        self._port = port
        self._model = model
        self._random = random.Random(seed)
        self._decoder = msgspec.json.Decoder(_Event)
        self._idle: list[Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # that they belong to
        self.start = time.monotonic()

    def restart(self) -> None:
        """Count time from now."""
        self.start = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    async def run(
        self, requests: Iterable[LiveRequest], patience_s: float = 0.0, until: float = TIMEOUT_S
    ) -> list[LiveRecord]:
        """All requests, each at its time; ends when all have an end, or at ``until``.

        A refused one comes back when it is told to, if that is at most ``patience_s`` away.
        """
        records = [LiveRecord(request, self._message(request)) for request in requests]
        self.restart()
        tasks = [asyncio.create_task(self._one(record, patience_s)) for record in records]
        await self._finish(tasks, until)
        return records

    def begin(self, request: LiveRequest) -> tuple[LiveRecord, asyncio.Task[None]]:
        """Send a request now; its record fills up while the task runs."""
        record = LiveRecord(request)
        return record, asyncio.create_task(self._try(record))

    async def run_closed(
        self, make: Callable[[], LiveRequest], concurrency: int, seconds: float
    ) -> list[LiveRecord]:
        """``concurrency`` clients that each ask again at once, for some seconds."""
        self.restart()
        records: list[LiveRecord] = []

        async def keep_asking() -> None:
            while self.now < seconds:
                record = LiveRecord(make())
                records.append(record)
                await self._try(record)

        await self._finish(
            [asyncio.create_task(keep_asking()) for _ in range(concurrency)], seconds
        )
        return records

    async def _finish(self, tasks: list[asyncio.Task[None]], until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - self.now):
                await asyncio.gather(*tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, writer in self._idle:
            writer.close()
        self._idle = []

    async def _one(self, record: LiveRecord, patience_s: float) -> None:
        await asyncio.sleep(record.request.at - self.now)
        while True:
            await self._try(record)
            if record.status != 429:
                return
            told = record.refused[-1][2]
            if told > patience_s:
                return
            await asyncio.sleep(told)

    async def _try(self, record: LiveRecord) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            connection = await self._connection()
            can_keep = False
            try:
                can_keep = await self._exchange(record, *connection)
            finally:
                if can_keep:
                    self._idle.append(connection)
                else:
                    connection[1].close()

    async def _connection(self) -> Connection:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._idle = loop, []
        if self._idle:
            return self._idle.pop()
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _exchange(
        self, record: LiveRecord, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection can be used again."""
        sent = self.now
        record.sent = record.sent or sent
        writer.write(record.message or self._message(record.request))
        head = await reader.readuntil(b"\r\n\r\n")
        record.status = int(head.split(b" ", 2)[1])
        if record.status != 200:
            await reader.readexactly(int(_header(head, b"content-length") or 0))
        if record.status == 429:
            told_s = int(_header(head, b"retry-after-ms") or 0) / 1000
            record.refused.append((sent, self.now, told_s))
        if record.status != 200:
            return _header(head, b"connection") != b"close"
        while line := await reader.readline():  # sizes of chunks among them, which match nothing
            if line.startswith(b"data: {"):
                self._take(record, self._decoder.decode(line[6:]))
            elif line.startswith(b"data: [DONE]"):
                record.ended = self.now
            elif line == b"0\r\n":  # the last chunk
                return await reader.readline() == b"\r\n"
        return False

    def _take(self, record: LiveRecord, event: _Event) -> None:
        if any(choice.text for choice in event.choices):
            record.first_token = record.first_token or self.now
            record.token_times.append(self.now)
        if event.usage is not None:
            record.num_tokens = event.usage.completion_tokens

    def _message(self, request: LiveRequest) -> bytes:
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": request.text or self._random.choices(VOCAB, k=request.num_prompt),
                "max_tokens": request.num_outputs,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        if request.tenant:
            head += f"x-shoal-tenant: {request.tenant}\r\n"
        if request.slo_class:
            head += f"x-shoal-slo-class: {request.slo_class}\r\n"
        return head.encode() + b"\r\n" + body


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(name + b":"):
            return line.partition(b":")[2].strip()
    return None


def poisson(
    seed: str, per_s: float, seconds: float, make: Callable[[random.Random, float], LiveRequest]
) -> list[LiveRequest]:
    """Independent arrivals."""
    draw = random.Random(seed)
    requests = []
    at = draw.expovariate(per_s)
    while at < seconds:
        requests.append(make(draw, at))
        at += draw.expovariate(per_s)
    return requests
