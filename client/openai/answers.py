"""ASGI responses that run a generation, and stop it as soon as the client is gone."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shoal.client.errors import ShoalError
from shoal.client.openai import wire
from shoal.client.openai.generation import ChoiceDelta, Generation
from shoal.client.openai.http_protocol import BodyWriter, body_writer
from shoal.client.openai.json_body import ClientGoneError
from shoal.client.openai.key_limits import TokenLease
from shoal.client.openai.wire import AnswerWire

logger = logging.getLogger("shoal.openai")

CALLERS_NAMES = {"text_input": "prompt", "input_ids": "prompt"}

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold events back
]


def error_response(error: ShoalError) -> Response:
    """The error as JSON with its own status."""
    if error.detail:
        logger.warning("status %d: %s [%s]", error.status, error.message, error.detail)
    return Response(
        wire.error_body(error),
        status_code=error.status,
        headers=wire.error_headers(error),
        media_type="application/json",
    )


class SendWatch:
    """Notices a client that does not read for too long, by one timer a stream: a timeout around
    each piece would cost more than the piece."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since: float | None = None  # the sending that is going on has begun
        self._has_expired = False
        self._timer = self._loop.call_later(timeout_s, self._check)

    def __enter__(self) -> "SendWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def of(self, sending: Awaitable[None]) -> None:
        """Wait for it. Raises ClientGoneError when it takes too long."""
        self._since = self._loop.time()
        try:
            await sending
        except asyncio.CancelledError:
            if not self._has_expired or self._task is None or self._task.uncancel() > 0:
                raise
            raise ClientGoneError from None
        finally:
            self._since = None

    def _check(self) -> None:
        now = self._loop.time()
        begun = now if self._since is None else self._since
        if now - begun < self._timeout_s:
            self._timer = self._loop.call_at(begun + self._timeout_s, self._check)
        elif self._task is not None:
            self._has_expired = True
            self._task.cancel()


class EventWriter:
    """Writes a stream's events as its deltas arrive."""

    def __init__(self, body: BodyWriter, wire: AnswerWire) -> None:
        self._body = body
        self._wire = wire

    @property
    def is_open(self) -> bool:
        return self._body.is_open

    def write(self, delta: ChoiceDelta) -> None:
        events = self._wire.delta_events(delta)
        if events:
            self._body.write(events)


class GenerationResponse(Response):
    """Answers with a generation, whole or as server-sent events.

    The headers are sent only once the backend took the request, so that a refusal has its own
    status. A vanished client cancels the generation, in every phase.
    """

    def __init__(
        self,
        start: Callable[[], Generation],
        wire: AnswerWire,
        stream: bool,
        send_timeout_s: float,
        lease: TokenLease | None = None,
        names: Mapping[str, str] = CALLERS_NAMES,
    ) -> None:
        """``names``: what the caller calls the backend's inputs."""
        super().__init__()
        self._lease = lease
        self._start = start
        self._wire = wire
        self._stream = stream
        self._send_timeout_s = send_timeout_s
        self._names = names
        self._watch: SendWatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_wait_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                with contextlib.suppress(ClientGoneError):
                    work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._start() as generation, self._charged(generation):
            try:
                await generation.start()
                if not self._stream:
                    response = await self._whole(generation)
            except ShoalError as error:
                response = error_response(self._named(error))
            except (OSError, ClientGoneError):
                raise
            except Exception:
                logger.exception("a generation failed")
                response = error_response(internal_error())
            else:
                if self._stream:
                    await self._send_events(generation, send, body_writer(scope))
                    return
            await response(scope, receive, send)

    def _named(self, error: ShoalError) -> ShoalError:
        return named_for_caller(error, self._names)

    @contextlib.asynccontextmanager
    async def _charged(self, generation: Generation) -> AsyncIterator[None]:
        """Charge the key for the tokens; for a client that left before they were told, those
        that were set aside."""
        try:
            yield
        except (asyncio.CancelledError, ClientGoneError, OSError):
            if self._lease is not None and generation.usage.total_tokens:
                self._lease.settle(generation.usage.total_tokens)
            raise
        if self._lease is not None:
            self._lease.settle(generation.usage.total_tokens)

    async def _whole(self, generation: Generation) -> Response:
        async for _ in generation.deltas():
            pass
        body = self._wire.body(generation.choices(), generation.usage)
        return Response(body, media_type="application/json")

    async def _send_events(
        self, generation: Generation, send: Send, body: BodyWriter | None
    ) -> None:
        writer = None if body is None else EventWriter(body, self._wire)
        with SendWatch(self._send_timeout_s) as self._watch:
            await self._send_all_events(generation, send, writer)

    async def _send_all_events(
        self, generation: Generation, send: Send, writer: EventWriter | None
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            starts = [self._wire.start_events(i) for i in range(generation.num_choices)]
            await self._send_body(send, b"".join(starts))
            async for delta in generation.deltas(writer):
                await self._send_body(send, self._wire.delta_events(delta))
            last = self._wire.end_events(generation.usage)
        except ShoalError as error:
            logger.warning("a stream ended early: %s [%s]", error.message, error.detail)
            last = self._wire.error_event(self._named(error))
        except (OSError, ClientGoneError):
            raise
        except Exception:
            logger.exception("a stream failed")
            last = self._wire.error_event(internal_error())
        await self._send_body(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, send: Send, body: bytes) -> None:
        """Send one piece; a client that does not read for too long counts as gone."""
        if not body:
            return
        message: Message = {"type": "http.response.body", "body": body, "more_body": True}
        await self._watch.of(send(message))


def named_for_caller(error: ShoalError, names: Mapping[str, str] = CALLERS_NAMES) -> ShoalError:
    """The backend names its own inputs; the caller knows them by other names."""
    for name, callers in names.items():
        if error.param is not None and error.param.startswith(name):
            param = callers + error.param.removeprefix(name)
            return replace(error, param=param, message=error.message.replace(name, callers))
    return error


def internal_error() -> ShoalError:
    return ShoalError("The server failed to answer. Try again.", 500)


async def _wait_disconnect(receive: Receive) -> None:
    message: dict[str, Any] = {}
    while message.get("type") != "http.disconnect":
        message = dict(await receive())
