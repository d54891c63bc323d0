"""uvicorn's HTTP protocol with the limits it lacks: size, number and time of request heads."""

import asyncio
from collections import deque
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from shoal.client.errors import ShoalError
from shoal.client.openai.wire import error_body

HEAD_TIMEOUT_S = 30.0
HEAD_END = b"\r\n\r\n"
REFUSAL_HEAD = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"


BODY_WRITER = "shoal.body_writer"  # among a scope's extensions


class TooManyHeadersError(Exception):
    pass


class BodyWriter:
    """Writes pieces of a body that ``send`` has begun, past all that lies around ``send``: for many
    small ones. As with that, more may follow, and only ``send`` ends the body."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether a piece can be written without waiting for the client to read."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.flow.write_paused or cycle.disconnected)

    def write(self, piece: bytes) -> None:
        """While ``is_open``; not empty, which would end the body."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def body_writer(scope: Scope) -> BodyWriter | None:
    """That of a request; None where another server has it, as in tests."""
    return scope.get("extensions", {}).get(BODY_WRITER)


def limited_protocol(max_head_bytes: int, max_headers: int) -> type[HttpToolsProtocol]:
    """A protocol class that refuses larger heads with 431 and closes slow connections."""

    class LimitedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = True
            self._head_bytes = 0
            self._tail = b""  # the last bytes of the head so far: its end may be split
            self._head_timer: asyncio.TimerHandle | None = None
            self._cycles: deque[RequestResponseCycle] = deque()  # not answered; the first one runs

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)
            # It tells the last of pipelined requests alone.
            for cycle in self._cycles:
                cycle.disconnected = not cycle.response_complete
                cycle.message_event.set()
            self._cycles.clear()

        def data_received(self, data: bytes) -> None:
            # Counted before parsing: the parser keeps all it has of a header that never ends.
            if self._in_head:
                self._start_timer()
                window = self._tail + data
                end = window.find(HEAD_END)
                if self._head_bytes + (len(window) if end < 0 else end) > max_head_bytes:
                    self._refuse()
                    return
                self._head_bytes += len(data)
                self._tail = window[-3:]
            super().data_received(data)

        def on_header(self, name: bytes, value: bytes) -> None:
            if len(self.headers) >= max_headers:
                raise TooManyHeadersError
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_timer()
            super().on_headers_complete()
            if self.cycle is not None:
                while self._cycles and self._cycles[0].response_complete:
                    self._cycles.popleft()
                self._cycles.append(self.cycle)
                self.scope["extensions"] = {BODY_WRITER: BodyWriter(self.cycle)}  # type: ignore[typeddict-item]

        def on_message_complete(self) -> None:
            self._in_head = True
            self._head_bytes = 0
            self._tail = b""
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            if self.headers is not None and len(self.headers) >= max_headers:
                self._refuse()
                return
            self._write(ShoalError("The request is not valid HTTP.", 400, "invalid_http"))

        def _refuse(self) -> None:
            limits = f"{max_head_bytes} bytes and {max_headers} headers"
            text = f"The request head is too large: at most {limits}."
            self._write(ShoalError(text, 431, "headers_too_large"))

        def _write(self, error: ShoalError) -> None:
            body = error_body(error)
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
            self.transport.close()

        def _close_idle(self) -> None:
            self._head_timer = None
            if self.cycle is not None and not self.cycle.response_complete:
                self._start_timer()  # the next request may take its time while one is answered
            else:
                self.transport.close()

        def _start_timer(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_idle)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return LimitedProtocol
