"""The Python SDK: a typed client over gRPC or HTTP, asynchronous and synchronous."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from shoal.client.errors import ShoalError, unavailable
from shoal.client.retries import RetryPolicy
from shoal.client.tally import Tally
from shoal.client.transports import AnswerStream, Prompt, make_transport
from shoal.client.types import Completion, Delta, ModelInfo, Usage

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_RETRIES = RetryPolicy()
T = TypeVar("T")


class AsyncDeltaStream:
    """The deltas of one answer, as they come. Leave the ``async with`` early to cancel it.

    ``usage`` and ``finish_reason`` (None until the end) tell how far it is.
    """

    def __init__(self, start: Callable[[], Awaitable[tuple[AnswerStream, Delta]]]) -> None:
        """``start`` sends the request and waits for its first delta."""
        self._start = start
        self._stream: AnswerStream | None = None
        self._closed = False
        self._tally = Tally()

    async def __aenter__(self) -> "AsyncDeltaStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._closed:
            raise StopAsyncIteration
        if self._stream is not None:
            delta = await self._stream.__anext__()
        else:
            self._stream, delta = await self._start()
            if self._closed:  # by another task, meanwhile
                await self._stream.aclose()
                raise StopAsyncIteration
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
    """Asks a Shoal server. Belongs to the event loop in which it was made.

    ``url`` is ``host:port`` of Triton's gRPC, or the ``http://`` or ``https://`` URL of the OpenAI
    endpoint, which may want an ``api_key`` (default: SHOAL_API_KEY). A ``prompt`` is text, token
    ids or chat messages. ``sampling`` are the backend's names: max_tokens, temperature, top_p,
    top_k, min_p, seed, stop, stop_token_ids, min_tokens, ignore_eos, response_format, tools, n and
    so on. Every failure is a ShoalError; ``retries`` says which are tried again, as long as no part
    of the answer has come out. Cancelling the task that waits cancels the request.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str | None = None,
        api_key: str | None = None,
        ca_file: Path | None = None,
        retries: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        if api_key is None and url.startswith("http"):
            api_key = os.environ.get("SHOAL_API_KEY") or None
        self._transport = make_transport(url, api_key, ca_file)
        self._retries = retries
        self._model = model

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; what still runs is cancelled."""
        await self._transport.close()

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

        async def attempt(left_s: float | None) -> Completion:
            tally = Tally()
            answer = await self._start(prompt, model, version, False, left_s, sampling)
            try:
                while True:
                    tally.add(await answer.__anext__())
            except StopAsyncIteration:
                return tally.completion()
            finally:
                await answer.aclose()

        return await self._retries.run(attempt, timeout_s)

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

        async def attempt(left_s: float | None) -> tuple[AnswerStream, Delta]:
            answer = await self._start(prompt, model, version, True, left_s, sampling)
            try:
                return answer, await answer.__anext__()
            except BaseException:
                await answer.aclose()
                raise

        return AsyncDeltaStream(lambda: self._retries.run(attempt, timeout_s))

    async def models(self) -> list[ModelInfo]:
        """The models and versions of the server: over gRPC those that are not loaded, too."""
        return await self._transport.models()

    async def ready(self, model: str | None = None) -> bool:
        """Whether the model's engine answers and says it is ready."""
        try:
            return await self._transport.is_ready(model or await self._default_model())
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
    ) -> AnswerStream:
        name = model or await self._default_model()
        return self._transport.generate(name, version, prompt, sampling, stream, timeout_s)

    async def _default_model(self) -> str:
        """The model given at construction, or the only one that is loaded."""
        if self._model is None:
            names = sorted({info.name for info in await self._transport.models() if info.ready})
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

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str | None = None,
        api_key: str | None = None,
        ca_file: Path | None = None,
        retries: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        async def make() -> AsyncClient:
            return AsyncClient(url, model=model, api_key=api_key, ca_file=ca_file, retries=retries)

        self._loop = _LoopThread()
        try:
            self._client = self._loop.run(make())
        except BaseException:
            self._loop.stop()
            raise

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
        """The models and versions of the server: over gRPC those that are not loaded, too."""
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
