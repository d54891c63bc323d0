"""Whole messages over a stream socket: each with its length before it, 4 bytes, little-endian."""

import contextlib
import select
import socket
import struct
import time

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024
_WRITE_BYTES = 2**20  # offered at a time; a socket takes less
# The most that one look reads, so that a fast sender cannot hold its reader for ever.
_MOST_READ_BYTES = 8 * 2**20


class FrameSocket:
    """One end of a connected pair. Owned by one thread. Only where it is told to does it wait.

    A peer that is gone is no error: what it sent before can be read, then ``is_over`` is set.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._received = bytearray()  # the beginning of a message
        self._waiting = bytearray()  # to be sent when there is room
        self.is_over = False

    def fileno(self) -> int:
        """For a poller: readable, ``receive`` has something or finds the end."""
        return self._socket.fileno()

    @property
    def num_waiting(self) -> int:
        """Bytes that wait for room: ``flush`` when the socket becomes writable."""
        return len(self._waiting)

    def send(self, message: bytes) -> bool:
        """Send without waiting; what finds no room is kept. False: the peer is gone."""
        if self.is_over:
            return False
        frame = _LENGTH.pack(len(message)) + message
        if self._waiting:
            self._waiting += frame
            return self.flush()
        num_sent = self._write(frame)
        if self.is_over:
            return False
        self._waiting += memoryview(frame)[num_sent:]
        return True

    def flush(self, timeout_ms: float = 0) -> bool:
        """Send what waits, as far as there is room or comes to be some in time. False: the peer is
        gone."""
        deadline = time.monotonic() + timeout_ms / 1000
        while self._waiting and not self.is_over:
            with memoryview(self._waiting) as waiting, waiting[:_WRITE_BYTES] as first:
                num_sent = self._write(first)
            del self._waiting[:num_sent]  # moves nothing: the array begins further on
            if num_sent:
                continue
            left_ms = 1000 * (deadline - time.monotonic())
            if left_ms <= 0:
                break
            _wait_for(self._socket, select.POLLOUT, left_ms)
        return not self.is_over

    def receive(self, timeout_ms: int = 0, rest_ms: int = 0) -> list[bytes]:
        """All messages that have come, waiting at most ``timeout_ms`` for the first. Where only a
        part of one has come there may be none: a socket holds some 200 KB. ``rest_ms``: how long to
        wait for each next piece of such a one."""
        data = self._read()
        if not data and timeout_ms and not self.is_over:
            _wait_for(self._socket, select.POLLIN, timeout_ms)
            data = self._read()
        messages = self._split(data)
        num_read = len(data)
        while rest_ms and data and self._received and num_read < _MOST_READ_BYTES:
            _wait_for(self._socket, select.POLLIN, rest_ms)
            data = self._read()
            messages += self._split(data)
            num_read += len(data)
        return messages

    def close(self) -> None:
        self._socket.close()
        self.is_over = True

    def _write(self, data: bytes | memoryview) -> int:
        """How many bytes of it found room."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.is_over = True
            return 0

    def _read(self) -> bytes:
        parts: list[bytes] = []
        num_read = 0
        with contextlib.suppress(BlockingIOError):
            while num_read < _MOST_READ_BYTES:
                try:
                    part = self._socket.recv(_READ_BYTES)
                except ConnectionError:  # gone, with something of ours unread
                    part = b""
                if not part:
                    self.is_over = True
                    break
                parts.append(part)
                num_read += len(part)
                if len(part) < _READ_BYTES:
                    break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _split(self, data: bytes) -> list[bytes]:
        if self._received:
            self._received += data
            if not self._has_whole():
                return []
            data = bytes(self._received)
        messages = []
        at = 0
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            start = at + _LENGTH.size
            if len(data) - start < length:
                break
            at = start + length
            messages.append(data[start:at])
        self._received = bytearray(data[at:])
        return messages

    def _has_whole(self) -> bool:
        """Whether what has come holds a message; without a look at all of it, which may come in
        many pieces."""
        if len(self._received) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._received)
        return len(self._received) >= _LENGTH.size + int(length)


def _wait_for(connected: socket.socket, event: int, timeout_ms: float) -> None:
    poller = select.poll()
    poller.register(connected, event)
    poller.poll(timeout_ms)
