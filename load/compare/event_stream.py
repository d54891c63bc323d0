"""What a server sent, as it arrived, into events with the time of each.

Read after the measurement: while it runs, a client that parses would measure itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec


class StreamError(ValueError):
    """An answer that is not a whole stream of completion events; says what it was instead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed completion. Times are on the clock of the pieces."""

    text_times: tuple[float, ...]  # of the events that carried text
    text: str
    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None


class _Choice(msgspec.Struct):
    text: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


def read_answer(pieces: Iterable[tuple[float, bytes]]) -> Answer:
    """Decode an HTTP response of server-sent events from its pieces and their times.

    Raises StreamError for another status, an error event, no text or no usage.
    """
    body = _Body()
    times: list[float] = []
    texts: list[str] = []
    usage: _Usage | None = None
    for time, data in pieces:
        for line in body.feed(data):
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = _decode(line[5:])
            usage = event.usage or usage
            if event.choices and event.choices[0].text:
                times.append(time)
                texts.append(event.choices[0].text)
    if body.status != 200:
        raise StreamError(f"HTTP {body.status}: {body.rest[:300].decode(errors='replace')}")
    if not times or usage is None:
        raise StreamError("the stream ended without " + ("usage" if times else "text"))
    details = usage.prompt_tokens_details
    return Answer(
        tuple(times),
        "".join(texts),
        usage.prompt_tokens,
        usage.completion_tokens,
        details.cached_tokens if details else None,
    )


def _decode(data: bytes) -> _Event:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise StreamError(f"an event is not as expected: {error}") from error
    if event.error is not None:
        raise StreamError(f"the server reported: {str(event.error)[:300]}")
    return event


class _Body:
    """An HTTP response's lines, whether or not it is sent in chunks."""

    def __init__(self) -> None:
        self.status = 0  # until the head is there
        self._is_chunked = False
        self._raw = b""
        self._in_chunk = 0  # bytes of the current chunk that are still to come
        self.rest = b""  # of the body, after its last whole line

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends; none of an error's body."""
        self._raw += data
        if not self.status and not self._take_head():
            return []
        self.rest += self._take_chunks() if self._is_chunked else self._take_raw(len(self._raw))
        if self.status != 200:
            return []
        *lines, self.rest = self.rest.split(b"\n")
        return [line.rstrip(b"\r") for line in lines]

    def _take_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        try:
            self.status = int(head.split(b" ", 2)[1])
        except (IndexError, ValueError):
            raise StreamError(f"not an HTTP response: {head[:100]!r}") from None
        headers = head.lower().split(b"\r\n")[1:]
        self._is_chunked = any(
            line.startswith(b"transfer-encoding:") and b"chunked" in line for line in headers
        )
        self._raw = rest
        return True

    def _take_raw(self, count: int) -> bytes:
        taken, self._raw = self._raw[:count], self._raw[count:]
        return taken

    def _take_chunks(self) -> bytes:
        out = b""
        while self._raw:
            if self._in_chunk:
                piece = self._take_raw(self._in_chunk)
                self._in_chunk -= len(piece)
                out += piece
                continue
            line, end, rest = self._raw.lstrip(b"\r\n").partition(b"\r\n")
            if not end:
                break
            self._in_chunk = int(line.split(b";")[0], 16)
            self._raw = rest
            if not self._in_chunk:  # the last chunk
                self._raw = b""
        return out
