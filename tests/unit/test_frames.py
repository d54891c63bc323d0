"""Messages over a stream socket: whole, in order, and never waiting unless told to."""

import random
import socket
import threading
import time
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


def send_all(end: FrameSocket, message: bytes) -> None:
    end.send(message)
    assert end.flush(timeout_ms=60_000)


def test_a_message_of_many_pieces_comes_in_one_look_that_waits_for_them(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    one, other = ends
    message = random.Random(1).randbytes(LARGE)
    sender = threading.Thread(target=send_all, args=(one, message))
    sender.start()
    # As long a wait as a test can take: the pieces come within microseconds.
    assert other.receive(timeout_ms=60_000, rest_ms=20_000) == [message]
    sender.join()


def test_a_part_is_not_waited_for_longer_than_told(ends: tuple[FrameSocket, FrameSocket]) -> None:
    one, other = ends
    one.send(b"x" * LARGE)
    assert other.receive(timeout_ms=1000, rest_ms=1) == []
    assert one.flush()
    assert not other.is_over


def test_a_large_message_costs_by_its_size_not_by_size_times_pieces(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    one, other = ends
    message = b"x" * (48 * 2**20)  # of the pixels of a request, say
    cpu_s: list[float] = []

    def send() -> None:
        started = time.thread_time()
        send_all(one, message)
        cpu_s.append(time.thread_time() - started)

    sender = threading.Thread(target=send)
    sender.start()
    started = time.thread_time()
    assert receive_all(other, 1) == [message]
    cpu_s.append(time.thread_time() - started)
    sender.join()
    # A copy of all that waits for each piece took 6 s and 2.6 s.
    assert max(cpu_s) < 2


def test_nothing_is_kept_for_a_peer_that_is_gone(ends: tuple[FrameSocket, FrameSocket]) -> None:
    one, other = ends
    other.close()
    assert not one.send(b"x" * LARGE)
    assert not one.send(b"x")
    assert not one.num_waiting
