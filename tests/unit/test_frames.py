"""Messages over a stream socket: whole, in order, and never waiting unless told to."""

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from shoal.backend.frames import FrameSocket

LARGE = 5_000_000  # bytes, more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    one, other = map(FrameSocket, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def receive_all(end: FrameSocket, count: int) -> list[bytes]:
    messages: list[bytes] = []
    while len(messages) < count and not end.is_over:
        messages += end.receive(timeout_ms=1000)
    return messages


def test_messages_of_all_sizes_arrive_whole_and_in_order(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    one, other = ends
    draw = random.Random(0)
    sizes = [
        0,
        1,
        3,
        LARGE,
        0,
        256 * 1024 - 4,
        256 * 1024,
        *(draw.randrange(9000) for _ in "x" * 80),
    ]
    sent = [draw.randbytes(size) for size in sizes]

    def send() -> None:
        for message in sent:
            assert one.send(message)
            one.flush(timeout_ms=60_000)

    sender = threading.Thread(target=send)
    sender.start()
    assert receive_all(other, len(sent)) == sent
    sender.join()
    assert not one.num_waiting


def test_what_finds_no_room_waits_in_order_and_goes_when_there_is_some(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    one, other = ends
    assert one.send(b"x" * LARGE)
    assert one.send(b"after it")
    assert one.num_waiting > 0
    received: list[bytes] = []
    while len(received) < 2:
        received += other.receive()
        assert one.flush()
    assert received == [b"x" * LARGE, b"after it"]
    assert one.flush(timeout_ms=60_000)
    assert not one.num_waiting


def test_a_part_of_a_message_is_none_yet(ends: tuple[FrameSocket, FrameSocket]) -> None:
    plain, raw = socket.socketpair()
    end = FrameSocket(plain)
    frame = (5).to_bytes(4, "little") + b"hello"
    for byte in frame[:-1]:
        raw.send(bytes([byte]))
        assert end.receive() == []
    raw.send(frame[-1:] + frame + frame[:2])
    assert end.receive() == [b"hello", b"hello"]
    raw.close()
    assert end.receive() == []
    assert end.is_over
    end.close()


def test_nothing_to_read_is_waited_for_no_longer_than_told(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    one, other = ends
    assert other.receive() == []
    assert other.receive(timeout_ms=1) == []
    assert not other.is_over


def test_what_was_sent_before_the_end_is_read_first(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    one, other = ends
    other.send(b"never read by the other side")
    one.send(b"first")
    one.send(b"second")
    one.close()
    assert other.receive() == [b"first", b"second"]
    assert other.receive(timeout_ms=1000) == []
    assert other.is_over
    assert not other.send(b"too late")
