"""What a process keeps of each request of its channels, and of each channel."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.backend.channel_messages import ACK_EVERY, ChannelDelta
from shoal.client import errors
from shoal.client.errors import ShoalError

logger = logging.getLogger("shoal.channel")

JOIN_ABOVE = 8  # deltas that wait for their reader; more are joined where they are plain text
# A reader so far behind is cut off. No answer of text alone is as long.
MAX_WAITING_BYTES = 8 * 2**20

Drop = Callable[["ChannelStream"], None]  # lets the backend end the request
Listener = Callable[[ChannelDelta], bool]  # whether it has taken a delta


class ChannelStream:
    """The deltas of one request. Close it (or leave its ``async with``) to cancel the request.

    Ends when every choice has had a finish reason; raises ShoalError on any other end.
    """

    def __init__(self, drop: Drop, ref: int, encoded: bytes, num_choices: int) -> None:
        self.ref = ref
        self.encoded = encoded  # the submission, until the backend is known to have it
        self.opening: Opening | None = None  # where it was sent to, or is about to be
        self.message_id = ""
        self.num_submits = 0
        self._begun_at = time.monotonic()
        self._drop = drop
        self._num_unfinished = num_choices
        self._waiting: deque[ChannelDelta] = deque()
        self._waiting_bytes = 0
        self._failure: ShoalError | None = None
        self._ended = False  # nothing more comes
        self._reader: asyncio.Future[None] | None = None
        self._listener: Listener | None = None

    @property
    def age_ms(self) -> int:
        """Since it was asked for."""
        return int(1000 * (time.monotonic() - self._begun_at))

    def __aiter__(self) -> "ChannelStream":
        return self

    async def __aenter__(self) -> "ChannelStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> ChannelDelta:
        while True:
            if self._waiting:
                return self._next()
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def listen(self, listener: Listener) -> None:
        """Offer each delta to ``listener`` as it arrives, while the reader waits for one; only what
        it does not take wakes the reader. That spares most deltas a turn of the event loop."""
        self._listener = listener

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._drop(self)
        self._waiting.clear()

    def fail(self, error: ShoalError) -> None:
        """Cancel the request and let its reader see ``error``; nothing if it has ended."""
        if not self._ended:
            self._drop(self)
            self._waiting.clear()
            self.end(error)

    def end(self, error: ShoalError | None) -> None:
        """The request has ended in the backend."""
        if self._ended:
            return
        self._ended = True
        self._failure = error
        self._wake()

    def take(self, told: ChannelDelta) -> bool:
        """What the backend says of it; whether that was the last."""
        self.encoded = b""
        if told.error is not None:
            self.end(ShoalError.from_dict(msgspec.structs.asdict(told.error)))
            return True
        if told.finish_reason in ("error", "cancelled"):
            text = "The server stopped the request before it was finished."
            self.end(errors.unavailable(text))
            return True
        self._put(told)
        if told.finish_reason is not None:
            self._num_unfinished -= 1
        if self._num_unfinished <= 0:
            self.end(None)
            return True
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self.fail(ShoalError("The answer was not read for too long.", 408, "too_slow"))
        return False

    def _put(self, delta: ChannelDelta) -> None:
        if self._is_heard(delta):
            return
        waiting = self._waiting
        self._waiting_bytes += _size(delta)
        if len(waiting) >= JOIN_ABOVE and _can_join(waiting[-1], delta):
            waiting[-1] = _joined(waiting[-1], delta)
        else:
            waiting.append(delta)
        self._wake()

    def _is_heard(self, delta: ChannelDelta) -> bool:
        if self._listener is None or self._reader is None or self._reader.done():
            return False
        try:
            return self._listener(delta)
        except Exception:
            logger.exception("a stream failed")
            self.fail(ShoalError("The server failed to answer. Try again.", 500))
            return True

    def _next(self) -> ChannelDelta:
        delta = self._waiting.popleft()
        self._waiting_bytes -= _size(delta)
        return delta

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(eq=False, slots=True)
class Opening:
    """One channel and the gRPC stream that carries it, to the channel's last response."""

    id: str
    message_id: str = ""  # of the request that is the channel
    version: str = ""  # the one that answers; empty: not known yet
    num_read: int = 0
    num_acknowledged: int = 0
    num_silent: int = 0  # looks at it since its last response
    to_submit: list[ChannelStream] = field(default_factory=list)
    cancellations: list[int] = field(default_factory=list)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # there are orders to send
    over: asyncio.Event = field(default_factory=asyncio.Event)  # with the channel's end
    is_closed_to_orders: bool = False  # its version is being unloaded
    has_ended: bool = False
    was_idle: bool = False  # when it ended
    call: Any = None
    task: asyncio.Task[None] | None = None

    @property
    def has_orders(self) -> bool:
        owes = self.num_read - self.num_acknowledged >= ACK_EVERY
        return not self.is_closed_to_orders and (owes or bool(self.cancellations))

    def end(self) -> None:
        """Nothing more is sent; the gRPC stream ends when all was answered."""
        self.has_ended = True
        self.wanted.set()
        self.over.set()


def _size(delta: ChannelDelta) -> int:
    size = len(delta.text) + len(delta.reasoning) + len(delta.logprobs or "")
    return size + len(delta.tool_calls or "") + len(delta.prompt_logprobs or "")


def _can_join(first: ChannelDelta, second: ChannelDelta) -> bool:
    """Whether both are plain text of one choice, which goes on after the first."""
    return (
        first.index == second.index
        and first.finish_reason is None
        and not (first.logprobs or second.logprobs or first.prompt_logprobs)
        and not (first.tool_calls or second.tool_calls or first.reasoning or second.reasoning)
        and not (first.embedding or second.embedding or second.prompt_logprobs)
    )


def _joined(first: ChannelDelta, second: ChannelDelta) -> ChannelDelta:
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        num_output_tokens=first.num_output_tokens + second.num_output_tokens,
    )
