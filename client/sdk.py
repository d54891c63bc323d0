"""The Python SDK: a typed client over gRPC, asynchronous and synchronous."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from shoal.client.errors import ShoalError, unavailable
from shoal.client.triton_stream import GenerationStream, TritonStream
from shoal.client.types import Completion, Delta, ModelInfo, Usage

DEFAULT_URL = "127.0.0.1:8001"
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
T = TypeVar("T")


class _Tally:
    """Sums up the deltas of one answer: its first choice, and the further ones of a request for
    several."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.own_usage = Usage()
        self.finish_reason: str | None = None
        self.others: dict[int, _Tally] = {}  # by index

    def add(self, delta: Delta) -> None:
        if delta.index:
            self.others.setdefault(delta.index, _Tally()).add(
                replace(delta, index=0, num_input_tokens=0, num_cached_tokens=0)
            )
            return
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.own_usage = Usage(
            max(self.own_usage.prompt_tokens, delta.num_input_tokens),
            self.own_usage.completion_tokens + delta.num_output_tokens,
            max(self.own_usage.cached_tokens, delta.num_cached_tokens),
        )
        self.finish_reason = delta.finish_reason or self.finish_reason

    @property
    def usage(self) -> Usage:
        """Of all choices."""
        return sum((other.own_usage for other in self.others.values()), self.own_usage)

    def completion(self) -> Completion:
        others = tuple(self.others[index].completion() for index in sorted(self.others))
        text = "".join(self.texts)
        return Completion(
            text, self.finish_reason or "", self.own_usage, tuple(self.token_ids), others
        )


class AsyncDeltaStream:
    """The deltas of one answer, as they come. Leave the ``async with`` early to cancel it.

    ``usage`` and ``finish_reason`` (None until the end) tell how far it is.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, GenerationStream]]) -> None:
        self._start = start
        self._stream: GenerationStream | None = None
        self._closed = False
        self._tally = _Tally()

    async def __aenter__(self) -> "AsyncDeltaStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._closed:
            raise StopAsyncIteration
        if self._stream is None:
            self._stream = await self._start()
        delta = await self._stream.__anext__()
        self._tally.add(delta)
        return delta

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._closed = True
        if self._stream is not None:
            await self._stream.aclose()

    @property
    def usage(self) -> Usage:
        return self._tally.usage

    @property
    def finish_reason(self) -> str | None:
        return self._tally.finish_reason

    def completion(self) -> Completion:
        """What has come so far, as one result."""
        return self._tally.completion()


class AsyncClient:
    """Asks a Shoal server over gRPC. Belongs to the event loop in which it was made.

    A ``prompt`` is text, token ids or chat messages. ``sampling`` are the backend's names:
    max_tokens, temperature, top_p, top_k, min_p, seed, stop, stop_token_ids, min_tokens,
    ignore_eos, kv_policy, kv_budget, n. Every failure is a ShoalError.
    """

    def __init__(self, url: str = DEFAULT_URL, *, model: str | None = None) -> None:
        self._triton = TritonStream(url)
        self._model = model

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; what still runs is cancelled."""
        await self._triton.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        version: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Completion:
        """Run one request to its end."""
        tally = _Tally()
        async with await self._start(prompt, model, version, False, timeout_s, sampling) as stream:
            async for delta in stream:
                tally.add(delta)
        return tally.completion()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        version: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncDeltaStream:
        """One request, started by the first step of iteration over the result."""
        return AsyncDeltaStream(
            lambda: self._start(prompt, model, version, True, timeout_s, sampling)
        )

    async def models(self) -> list[ModelInfo]:
        """All models and versions of the server's repository, loaded or not."""
        return await self._triton.models()

    async def ready(self, model: str | None = None) -> bool:
        """Whether the model's engine answers and says it is ready."""
        try:
            name = model or await self._default_model()
            return (await self._triton.status(name)).state == "ready"
        except ShoalError:
            return False

    async def _start(
        self,
        prompt: Prompt,
        model: str | None,
        version: str,
        stream: bool,
        timeout_s: float | None,
        sampling: dict[str, Any],
    ) -> GenerationStream:
        name = model or await self._default_model()
        return self._triton.generate(
            name,
            version,
            **_prompt_argument(prompt),
            sampling=sampling,
            stream=stream,
            return_token_ids=True,
            timeout_s=timeout_s,
        )

    async def _default_model(self) -> str:
        """The model given at construction, or the only one that is loaded."""
        if self._model is None:
            names = sorted({info.name for info in await self._triton.models() if info.ready})
            if not names:
                raise unavailable("No model is loaded.")
            if len(names) > 1:
                raise ShoalError(
                    f"Name a model: {', '.join(names)} are loaded.", 400, param="model"
                )
            self._model = names[0]
        return self._model


class DeltaStream:
    """The deltas of one answer, as they come. Leave the ``with`` early to cancel it."""

    def __init__(self, stream: AsyncDeltaStream, loop: "_LoopThread") -> None:
        self._stream = stream
        self._loop = loop

    def __enter__(self) -> "DeltaStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        delta = self._loop.run(self._next_or_none())
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._loop.run(self._stream.aclose())

    @property
    def usage(self) -> Usage:
        return self._stream.usage

    @property
    def finish_reason(self) -> str | None:
        return self._stream.finish_reason

    def completion(self) -> Completion:
        """What has come so far, as one result."""
        return self._stream.completion()

    async def _next_or_none(self) -> Delta | None:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:  # cannot cross from one thread to another
            return None


class Client:
    """AsyncClient for code without an event loop; any number of threads may use one object."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str | None = None) -> None:
        self._loop = _LoopThread()
        self._client = self._loop.run(_make_client(url, model))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what still runs is cancelled. Idempotent."""
        if self._loop.is_running:
            self._loop.run(self._client.close())
            self._loop.stop()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        version: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Completion:
        """Run one request to its end."""
        return self._loop.run(
            self._client.generate(
                prompt, model=model, version=version, timeout_s=timeout_s, **sampling
            )
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        version: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> DeltaStream:
        """One request, started by the first step of iteration over the result."""
        stream = self._client.stream(
            prompt, model=model, version=version, timeout_s=timeout_s, **sampling
        )
        return DeltaStream(stream, self._loop)

    def models(self) -> list[ModelInfo]:
        """All models and versions of the server's repository, loaded or not."""
        return self._loop.run(self._client.models())

    def ready(self, model: str | None = None) -> bool:
        """Whether the model's engine answers and says it is ready."""
        return self._loop.run(self._client.ready(model))


class _LoopThread:
    """An event loop in a daemon thread, for synchronous callers."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="shoal")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end and give back the result; interrupting the caller cancels the work."""
        if not self.is_running:
            work.close()
            raise ShoalError("The client is closed.", 400, "client_closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make_client(url: str, model: str | None) -> AsyncClient:
    return AsyncClient(url, model=model)


def _prompt_argument(prompt: Prompt) -> dict[str, Any]:
    """The keyword of TritonStream.generate that a prompt of this kind goes to."""
    if isinstance(prompt, str):
        return {"text_input": prompt}
    if not isinstance(prompt, Sequence) or not prompt:
        raise ShoalError("prompt must be text, token ids or messages, and not empty.", 400)
    if isinstance(prompt[0], Mapping):
        return {"messages": prompt}
    return {"input_ids": prompt}
