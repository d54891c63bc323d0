"""Follows one model's heartbeat, since tritonserver's own readiness says nothing of the engine."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

import grpc

from shoal.client.errors import ShoalError
from shoal.client.triton_stream import TritonStream
from shoal.client.types import Heartbeat

logger = logging.getLogger("shoal.heartbeat")

INTERVAL_MS = 250
COUNT = 20  # beats of INTERVAL_MS per ask; bounded in time, as each ask holds up an unload
SILENCE_S = 1.5  # without a beat for so long, ask anew
RETRY_S = 0.25
READY_AGE_S = 2.0
LATE_TIMER_S = 0.5

Callback = Callable[["HeartbeatMonitor"], None]


class HeartbeatMonitor:
    """Keeps asking a model for heartbeats and knows the last one.

    ``on_lost`` callbacks run once when no beat came for ``lost_after_s`` (only after a first beat),
    ``on_recovered`` ones at the next beat, ``on_beat`` ones at each. All run in the event loop.
    Pass a ``TritonStream`` to share its connection, or a URL to have one of its own.
    """

    def __init__(
        self,
        server: str | TritonStream,
        model: str,
        version: str = "",
        *,
        lost_after_s: float = 2.0,
        interval_ms: int | None = None,
    ) -> None:
        """``interval_ms``: between two beats; by default ``INTERVAL_MS``."""
        self.model = model
        self.version = version
        self.lost_after_s = lost_after_s
        self._interval_ms = interval_ms
        self.last: Heartbeat | None = None
        self.is_lost = False
        self.on_lost: list[Callback] = []
        self.on_recovered: list[Callback] = []
        self.on_beat: list[Callback] = []
        self.refused: Counter[str] = Counter()  # by tier, on this side; told with the next ask
        self._server = server
        self._beat_at: float | None = None
        self._beaten = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; infinite before the first."""
        return float("inf") if self._beat_at is None else time.monotonic() - self._beat_at

    @property
    def num_live(self) -> int:
        """Requests in the backend at the last beat; 0 while the model is lost."""
        return self.last.num_live if self.last is not None and not self.is_lost else 0

    @property
    def is_ready(self) -> bool:
        """Whether the model said it is ready, and said so lately."""
        if self.last is None or self.is_lost:
            return False
        return self.last.state == "ready" and self.age_s < READY_AGE_S

    def start(self) -> None:
        """Begin to follow; needs a running event loop. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"heartbeat {self.model}")

    async def stop(self) -> None:
        """Stop following. No callback runs afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the model is ready; False when it was not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_ready:
                    await self._next_beat()
        return self.is_ready

    async def wait_first_beat(self, timeout_s: float) -> bool:
        """Wait until anything was heard of the model at all."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.last is None:
                    await self._next_beat()
        return self.last is not None

    async def _next_beat(self) -> None:
        self._beaten.clear()
        await self._beaten.wait()

    async def _run(self) -> None:
        async with self._connection() as server:
            while True:
                try:
                    if await self._follow(server) > 0:
                        continue
                except (ShoalError, grpc.RpcError, TimeoutError) as error:
                    reason = getattr(error, "detail", None) or error
                    logger.debug("no heartbeat of %s: %s", self.model, reason)
                await asyncio.sleep(RETRY_S)

    async def _follow(self, server: TritonStream) -> int:
        """One ask; returns the number of beats. Raises TimeoutError when it falls silent."""
        count = 0
        refused = Counter(self.refused)
        interval_ms = self._interval_ms or INTERVAL_MS
        most = max(1, COUNT * INTERVAL_MS // interval_ms)
        beats = server.heartbeats(
            self.model, self.version, interval_ms=interval_ms, count=most, refused=refused
        )
        async with contextlib.aclosing(beats), asyncio.timeout(SILENCE_S) as silence:
            async for beat in beats:
                self._take(beat)
                if not count:
                    self.refused -= refused  # they have arrived
                count += 1
                silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
        return count

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[TritonStream]:
        if isinstance(self._server, TritonStream):
            yield self._server
            return
        async with TritonStream(self._server) as server:
            yield server

    def _take(self, beat: Heartbeat) -> None:
        self.last = beat
        self._beat_at = time.monotonic()
        self._beaten.set()
        self._arm(self.lost_after_s)
        if self.is_lost:
            self.is_lost = False
            self._call(self.on_recovered)
        self._call(self.on_beat)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._expire, loop.time() + delay_s)

    def _expire(self, due: float) -> None:
        if asyncio.get_running_loop().time() - due > LATE_TIMER_S:
            # Our own loop stood still: beats may lie unread, so read before judging.
            self._arm(LATE_TIMER_S)
            return
        self.is_lost = True
        logger.warning("heartbeat of %s lost for %.1f s", self.model, self.age_s)
        self._call(self.on_lost)

    def _call(self, callbacks: list[Callback]) -> None:
        for callback in list(callbacks):
            try:
                callback(self)
            except Exception:
                logger.exception("a heartbeat callback of %s failed", self.model)
