"""Where other threads leave orders for the dispatch loop, and how they wake it."""

import contextlib
import os
from collections import deque
from collections.abc import Iterator

from shoal.backend.chunk import Chunk
from shoal.backend.failures import shutting_down
from shoal.backend.orders import Order, Submitted


class Inbox:
    """Any thread posts; one takes, and polls ``fd`` meanwhile. Each order is taken once."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._is_closed = False
        self.fd, self._write = os.pipe()  # there is something to read after each wake
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def __len__(self) -> int:
        return len(self._orders)

    def post(self, order: Order) -> None:
        """Leave an order; never blocks. After the end a request is answered at once."""
        self._orders.append(order)
        if self._is_closed:
            self._refuse()
        else:
            self.wake()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            os.write(self._write, b"\0")

    def take(self) -> Iterator[Order]:
        """All that is there, and what comes meanwhile."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)
        while self._orders:
            yield self._orders.popleft()

    def close(self) -> None:
        """Nobody takes any more: whoever is there, or comes later, is told so."""
        self._is_closed = True
        self._refuse()

    def _refuse(self) -> None:
        """Safe from several threads."""
        with contextlib.suppress(IndexError):
            while True:
                order = self._orders.popleft()
                if isinstance(order, Submitted):
                    order.sink(Chunk.of_error(shutting_down()))
