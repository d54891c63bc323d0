"""A neutral client: a closed loop of streamed completions against any OpenAI-compatible server.

    python -m shoal.load.compare.client --port 9000 --model NAME --checkpoint FOLDER
        [--streams 8] [--requests 16] [--repeat] ...

A process of its own, the same for all servers, that prints one JSON object. While it measures it
only keeps what arrives and when; it reads that when all is over. A prompt is random words, an
answer exactly so many tokens, greedy, whatever ends the model would see.

TTFT: from before the connection to the first event with text. TPOT: from the first to the last
such event, by the tokens after the first. Tokens a second: all answers' tokens, as the server
counts them, by the time from the first request to the last answer's end. Times in milliseconds.
"""

import argparse
import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shoal.load.compare.event_stream import Answer, StreamError, read_answer
from shoal.load.compare.prompts import RandomWords

END = b"data: [DONE]"
TIMEOUT_S = 300.0
PAUSE_S = 0.2  # between a prompt's first and second time, for servers that tidy up afterwards
WARM_UP_TOKENS = 16


class ClosedLoop(msgspec.Struct, frozen=True):
    """What ``streams`` clients saw that each ask again at once."""

    streams: int
    requests: int
    prompt_tokens: list[int]  # the different counts that the server gave
    completion_tokens: list[int]
    wall_s: float
    tokens_per_s: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    gap_p50: float  # between successive events of one answer
    gap_max: float
    events_per_answer: float
    client_cpu_s: float


class Repeats(msgspec.Struct, frozen=True):
    """Prompts that were sent twice, one at a time."""

    prompt_tokens: list[int]
    first_ttft: list[float]
    repeat_ttft: list[float]
    cached_tokens: list[int | None]


@dataclass(slots=True)
class Exchange:
    """A request, and what came back. Times are of time.perf_counter."""

    started: float
    pieces: list[tuple[float, bytes]]
    ended: float = 0.0


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.pieces.append((now, data))
        if END in self._tail + data:
            self._end(now)
        self._tail = data[-len(END) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(time.perf_counter())

    def _end(self, now: float) -> None:
        if not self.ended.done():
            self.ended.set_result(now)


class Client:
    """Sends completions to one model of one server."""

    def __init__(self, port: int, model: str, host: str = "127.0.0.1") -> None:
        self._address = (host, port)
        self._model = model

    async def closed_loop(
        self, prompts: Sequence[str], streams: int, num_outputs: int
    ) -> list[Exchange]:
        """All prompts, ``streams`` at a time."""
        waiting = iter(prompts)
        exchanges: list[Exchange] = []

        async def keep_asking() -> None:
            for prompt in waiting:
                exchanges.append(await self.exchange(prompt, num_outputs))

        await asyncio.gather(*(keep_asking() for _ in range(streams)))
        return exchanges

    async def exchange(self, prompt: str, num_outputs: int) -> Exchange:
        """One request; ends with the answer or the connection."""
        request = self._request(prompt, num_outputs)
        exchange = Exchange(time.perf_counter(), [])
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            lambda: _Connection(request), *self._address
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                exchange.ended = await connection.ended
        finally:
            transport.close()
        exchange.pieces = connection.pieces
        return exchange

    def _request(self, prompt: str, num_outputs: int) -> bytes:
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": num_outputs,
                "min_tokens": num_outputs,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def measure_closed_loop(
    client: Client, words: RandomWords, streams: int, requests: int, lengths: tuple[int, int]
) -> ClosedLoop:
    """Warm up, then ``requests`` completions. ``lengths``: tokens of prompt and answer.

    Raises StreamError when one of them fails.
    """
    num_prompt, num_outputs = lengths
    prompts = [words.text(num_prompt) for _ in range(requests)]
    warm_up = [words.text(num_prompt) for _ in range(min(streams, 8))]
    for exchange in await client.closed_loop(warm_up, len(warm_up), WARM_UP_TOKENS):
        read_answer(exchange.pieces)
    cpu, start = _cpu_s(), time.perf_counter()
    exchanges = await client.closed_loop(prompts, streams, num_outputs)
    wall, cpu = time.perf_counter() - start, _cpu_s() - cpu
    return summarize(exchanges, streams, wall, cpu)


def summarize(
    exchanges: Sequence[Exchange], streams: int, wall_s: float, client_cpu_s: float
) -> ClosedLoop:
    """Figures of finished exchanges. Raises StreamError when one failed."""
    answers = [read_answer(exchange.pieces) for exchange in exchanges]
    ttfts = [a.text_times[0] - e.started for a, e in zip(answers, exchanges, strict=True)]
    tpots = [tpot for answer in answers if (tpot := _tpot(answer)) is not None]
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.text_times, answer.text_times[1:], strict=False)
    ]
    total = sum(answer.completion_tokens for answer in answers)
    return ClosedLoop(
        streams=streams,
        requests=len(answers),
        prompt_tokens=sorted({a.prompt_tokens for a in answers if a.prompt_tokens is not None}),
        completion_tokens=sorted({answer.completion_tokens for answer in answers}),
        wall_s=round(wall_s, 3),
        tokens_per_s=round(total / wall_s, 2),
        ttft_p50=_ms(ttfts, 50),
        ttft_p95=_ms(ttfts, 95),
        tpot_p50=_ms(tpots, 50),
        tpot_p95=_ms(tpots, 95),
        gap_p50=_ms(gaps, 50),
        gap_max=_ms(gaps, 100),
        events_per_answer=round(statistics.mean(len(a.text_times) for a in answers), 1),
        client_cpu_s=round(client_cpu_s, 3),
    )


async def measure_repeats(
    client: Client, words: RandomWords, requests: int, lengths: tuple[int, int]
) -> Repeats:
    """Each prompt twice, nothing else running. Raises StreamError when a request fails."""
    num_prompt, num_outputs = lengths
    read_answer((await client.exchange(words.text(num_prompt), num_outputs)).pieces)
    first: list[tuple[float, Answer]] = []
    repeat: list[tuple[float, Answer]] = []
    for _ in range(requests):
        prompt = words.text(num_prompt)
        for results in (first, repeat):
            exchange = await client.exchange(prompt, num_outputs)
            results.append((exchange.started, read_answer(exchange.pieces)))
            await asyncio.sleep(PAUSE_S)
    counts = {answer.prompt_tokens for _, answer in first}
    return Repeats(
        prompt_tokens=sorted(count for count in counts if count is not None),
        first_ttft=[_ms([answer.text_times[0] - start], 50) for start, answer in first],
        repeat_ttft=[_ms([answer.text_times[0] - start], 50) for start, answer in repeat],
        cached_tokens=[answer.cached_tokens for _, answer in repeat],
    )


def _tpot(answer: Answer) -> float | None:
    """Seconds; None of a single token, or where all came in one event."""
    if answer.completion_tokens < 2 or len(answer.text_times) < 2:
        return None
    return (answer.text_times[-1] - answer.text_times[0]) / (answer.completion_tokens - 1)


def _ms(seconds: Sequence[float], percent: float) -> float:
    return round(1000 * float(np.percentile(seconds, percent)), 3) if seconds else 0.0


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="the name that the server knows")
    parser.add_argument("--checkpoint", type=Path, required=True, help="with tokenizer.json")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", action="store_true", help="each prompt twice, one at a time")
    args = parser.parse_args()
    client = Client(args.port, args.model)
    words = RandomWords(args.checkpoint, args.seed)
    lengths = (args.prompt_tokens, args.output_tokens)
    result: ClosedLoop | Repeats
    try:
        if args.repeat:
            result = asyncio.run(measure_repeats(client, words, args.requests, lengths))
        else:
            result = asyncio.run(
                measure_closed_loop(client, words, args.streams, args.requests, lengths)
            )
    except (StreamError, OSError, TimeoutError) as error:
        sys.exit(f"error: {error or type(error).__name__}")
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
