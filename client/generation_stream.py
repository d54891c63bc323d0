"""The answer to one request that has a gRPC stream of its own."""

import asyncio
import contextlib
from collections import deque
from typing import Any

import grpc

from shoal.client import errors, tensors
from shoal.client.errors import ShoalError
from shoal.client.types import Delta

DRAIN_TIMEOUT_S = 5.0


class GenerationStream:
    """The deltas of one request. Close it (or leave its ``async with``) to cancel the request.

    Ends when every choice has had a finish reason; raises ShoalError on any other end.
    """

    def __init__(self, call: Any, model: str, num_choices: int = 1) -> None:
        self._call = call
        self._model = model
        self._num_unfinished = num_choices
        self._waiting: deque[Delta] = deque()  # of a response that told of several choices
        self._failure: ShoalError | None = None
        self._ended = False
        self._drain_task: asyncio.Task[None] | None = None

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __aenter__(self) -> "GenerationStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> Delta:
        if self._failure is not None:
            raise self._failure
        if self._waiting:
            return self._waiting.popleft()
        if self._ended:
            raise StopAsyncIteration
        try:
            delta, *others = tensors.read_deltas(await self._next_response())
        except ShoalError as error:
            self._end(error)
            raise
        self._waiting += others
        for part in (delta, *others):
            if part.finish_reason is not None:
                self._finish(part.finish_reason)
        return delta

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._end(None)

    def fail(self, error: ShoalError) -> None:
        """Cancel the request and let its reader see ``error``; nothing if it has ended."""
        if not self._ended:
            self._failure = error
            self._end(error)

    async def _next_response(self) -> Any:
        try:
            result, error = await self._call.__anext__()
        except StopAsyncIteration:
            raise errors.unavailable(
                "The model server ended the answer before it was finished."
            ) from None
        except grpc.RpcError as error:
            raise self._failure or errors.from_grpc(error.code().name, error.details()) from None
        except asyncio.CancelledError:
            # gRPC raises this for its own cancellation too, not only for that of our task.
            task = asyncio.current_task()
            if self._failure is not None and not (task and task.cancelling()):
                raise self._failure from None
            self._end(None)
            raise
        if error is not None:
            raise errors.from_tritonserver(error.message(), self._model)
        return result.get_response()

    def _finish(self, reason: str) -> None:
        if reason in ("error", "cancelled"):
            self._end(errors.unavailable("The server stopped the request before it was finished."))
            assert self._failure is not None
            raise self._failure
        self._num_unfinished -= 1
        if self._num_unfinished > 0:
            return
        self._ended = True
        self._drain_task = asyncio.create_task(self._drain())

    def _end(self, error: ShoalError | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._failure = error
        self._waiting.clear()
        self._call.cancel()

    async def _drain(self) -> None:
        """Read to the end of the call: cancelling one that is just ending races in tritonserver."""
        with contextlib.suppress(
            grpc.RpcError, StopAsyncIteration, TimeoutError, asyncio.CancelledError
        ):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while True:
                    await self._call.__anext__()
        self._call.cancel()
