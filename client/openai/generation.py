"""Runs the prompts of one HTTP request over the model's channel and merges what comes back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shoal.backend.channel_messages import ChannelDelta
from shoal.client.channel_stream import ChannelStream
from shoal.client.openai.logprobs import LogprobReader, TokenLogprob
from shoal.client.openai.prompts import Prompt
from shoal.client.openai.served_models import ServedModel
from shoal.client.openai.tool_calls import read_tool_calls
from shoal.client.types import Usage

QUEUED_DELTAS = 16  # per request with several prompts; a full queue holds the streams back


@dataclass(frozen=True, slots=True)
class Task:
    """What an endpoint has read of its request's body."""

    model_id: str
    prompts: list[Prompt]
    sampling: dict[str, Any]
    stream: bool = False
    echo: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request, checked."""

    model: ServedModel
    prompts: list[Prompt]
    sampling: dict[str, Any]
    stream: bool
    request_id: str
    parameters: dict[str, str] = field(default_factory=dict)  # whose it is, how urgent
    echo: bool = False

    @property
    def num_choices_each(self) -> int:
        """Of each prompt."""
        return int(self.sampling.get("n", 1))

    @property
    def wants_logprobs(self) -> bool:
        return "logprobs" in self.sampling

    @property
    def estimated_tokens(self) -> int:
        """Of prompts and answers, before anything is tokenised; an open end counts nothing."""
        longest = self.sampling.get("max_completion_tokens", self.sampling.get("max_tokens", 0))
        answers = max(longest, 0) * self.num_choices_each * len(self.prompts)
        return answers + sum(prompt.estimated_tokens for prompt in self.prompts)


@dataclass(slots=True)  # not frozen, which would triple the cost of what is made for each event
class ChoiceDelta:
    """What one choice gained; with everything in it, the whole choice.

    ``logprobs`` are those of the tokens of ``text``; None where the request wants none. ``usage``
    tells that of the choice up to here, until its next delta is made.
    """

    index: int
    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # deltas, as on the wire
    reasoning: str = ""  # what the model thought, before its answer
    embedding: bytes = b""  # of the prompt: float32, little-endian
    usage: Callable[[], Usage] = Usage


class DeltaWriter(Protocol):
    """Writes deltas out as they arrive, as long as it need not wait."""

    @property
    def is_open(self) -> bool: ...

    def write(self, delta: ChoiceDelta) -> None: ...


@dataclass(slots=True)
class ChoiceState:
    """What one choice has gained so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    embedding: bytes = b""
    finish_reason: str = ""
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    reader: LogprobReader = field(default_factory=LogprobReader)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, index: int, delta: ChannelDelta) -> ChoiceDelta:
        """Take what the backend sent; returns what the caller gets for it."""
        if delta.text:
            self.text.append(delta.text)
        self.embedding = delta.embedding or self.embedding
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.num_input_tokens = max(self.num_input_tokens, delta.num_input_tokens)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_output_tokens += delta.num_output_tokens
        self.finish_reason = delta.finish_reason or self.finish_reason
        calls = read_tool_calls(delta.tool_calls)
        self.tool_calls += calls
        entries = None
        if self.logprobs is not None:
            entries = self.reader.read(delta.prompt_logprobs) + self.reader.read(delta.logprobs)
            self.logprobs += entries
        return ChoiceDelta(
            index,
            delta.text,
            delta.finish_reason,
            entries,
            calls,
            delta.reasoning,
            usage=self.usage,
        )

    def usage(self) -> Usage:
        return Usage(self.num_input_tokens, self.num_output_tokens, self.num_cached_tokens)

    def whole(self, index: int) -> ChoiceDelta:
        return ChoiceDelta(
            index,
            "".join(self.text),
            self.finish_reason,
            self.logprobs,
            self.tool_calls,
            "".join(self.reasoning),
            self.embedding,
        )


class Generation:
    """The running streams of one request. Use as ``async with``: leaving cancels what still runs.

    ``deltas`` is read once; ``usage`` and ``choices`` are complete after it has ended.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._choices = [
            ChoiceState(logprobs=[] if request.wants_logprobs else None)
            for _ in range(len(request.prompts) * request.num_choices_each)
        ]
        self._streams: list[ChannelStream] = []
        self._first: list[ChannelDelta] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """Of all choices; a prompt counts once."""
        each = self._request.num_choices_each
        usages = [choice.usage() for choice in self._choices]
        outputs = sum(usage.completion_tokens for usage in usages)
        prompts = sum(usages[::each], Usage())
        return replace(prompts, completion_tokens=outputs)

    def choices(self) -> list[ChoiceDelta]:
        return [choice.whole(index) for index, choice in enumerate(self._choices)]

    async def start(self) -> None:
        """Start all streams and wait until each was accepted: that is its first response.

        Raises ShoalError when any is refused, so that a refusal still has a status of its own.
        """
        for prompt in self._request.prompts:
            self._streams.append(await self._open(prompt))
        if len(self._streams) == 1:
            self._first = [await anext(self._streams[0])]
            return
        async with _first_error_wins() as group:
            tasks = [group.create_task(stream.__anext__()) for stream in self._streams]
        self._first = [task.result() for task in tasks]

    async def deltas(self, writer: DeltaWriter | None = None) -> AsyncGenerator[ChoiceDelta, None]:
        """What the choices gain, as it comes. Raises ShoalError when a stream fails.

        What is not given is what ``writer`` has got already, in its order: of a single stream all
        but ends, while the caller waits for the next and the writer is open.
        """
        if writer is not None and len(self._streams) == 1:
            self._streams[0].listen(lambda delta: self._passes(delta, writer))
        merged = self._single() if len(self._streams) == 1 else self._merged()
        async with contextlib.aclosing(merged):
            async for prompt_index, delta in merged:
                index = prompt_index * self._request.num_choices_each + delta.index
                yield self._choices[index].add(index, delta)

    def _passes(self, delta: ChannelDelta, writer: DeltaWriter) -> bool:
        """To a writer that can take it. An end goes with what is sent after it."""
        if delta.finish_reason is not None or not writer.is_open:
            return False
        writer.write(self._choices[delta.index].add(delta.index, delta))
        return True

    async def _open(self, prompt: Prompt) -> ChannelStream:
        stream = self._request.model.channel.generate(
            text_input=prompt.text_input,
            messages=prompt.messages,
            input_ids=prompt.input_ids,
            sampling=self._request.sampling,
            stream=self._request.stream,
            return_logprobs=self._request.wants_logprobs,
            echo=self._request.echo,
            parameters=self._parameters(),
            request_id=self._request.request_id,
        )
        self._stack.enter_context(self._request.model.tracked(stream))
        return await self._stack.enter_async_context(stream)

    def _parameters(self) -> dict[str, str | int]:
        """The prompts of one request count together where they could never all be taken."""
        count = len(self._request.prompts)
        return {**self._request.parameters, **({"num_prompts": count} if count > 1 else {})}

    async def _single(self) -> AsyncGenerator[tuple[int, ChannelDelta], None]:
        yield 0, self._first[0]
        async for delta in self._streams[0]:
            yield 0, delta

    async def _merged(self) -> AsyncGenerator[tuple[int, ChannelDelta], None]:
        queue: asyncio.Queue[tuple[int, ChannelDelta] | BaseException | None]
        queue = asyncio.Queue(QUEUED_DELTAS)

        async def feed(index: int, first: ChannelDelta, stream: ChannelStream) -> None:
            try:
                await queue.put((index, first))
                async for delta in stream:
                    await queue.put((index, delta))
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        pairs = zip(self._first, self._streams, strict=True)
        tasks = [asyncio.create_task(feed(i, *pair)) for i, pair in enumerate(pairs)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _first_error_wins() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error comes out bare instead of inside a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
