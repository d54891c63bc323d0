"""Sends answers: one thread sends chunks, one thread looks for clients that have gone."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from shoal.backend.chunk import Chunk, join_by_choice
from shoal.scheduler.errors import RequestError

CANCEL_POLL_S = 0.05
# An HTTP client that has gone is noticed only when something is written to it.
KEEP_ALIVE_S = 1.0

log = logging.getLogger(__name__)


class Reply(Protocol):
    """Where the answer of one request goes. A final chunk closes it."""

    def send(self, chunk: Chunk, *others: Chunk) -> None:
        """Send one response; ``others`` are of further choices of the same request."""

    def is_cancelled(self) -> bool: ...

    def abandon(self) -> None:
        """Close without an answer, when even an error cannot be sent."""


class ResponseStream:
    """One open request: what waits to be sent. Its fields belong to the responder's lock."""

    def __init__(
        self,
        responder: "Responder",
        reply: Reply,
        stream: bool,
        every_token: bool,
        now: float,
        bundle: "Bundle | None" = None,
    ) -> None:
        self._responder = responder
        self.bundle = bundle  # what it is sent with, instead of a reply of its own
        self.reply = reply
        self.stream = stream
        self.every_token = every_token
        self.pending: list[Chunk] = []
        self.queued = False  # whether the send thread has it in its queue
        self.closed = False
        self.cancel: Callable[[], None] | None = None
        self.cancel_seen = False
        self.last_sent = now

    def post(self, chunk: Chunk) -> None:
        """Hand over the next chunk; any thread, returns at once."""
        self._responder.post(self, chunk)

    def waits_for(self, chunk: Chunk) -> bool:
        """Whether a chunk holds something the client waits for."""
        if not self.stream:
            return chunk.final
        return bool(
            chunk.text
            or chunk.reasoning
            or chunk.tool_calls
            or chunk.finish_reason
            or (self.every_token and chunk.token_ids)
        )


class Bundle(Protocol):
    """Sends what many requests gained as one response. ``ready``, ``queued`` and ``closed`` belong
    to the responder's lock."""

    ready: deque[ResponseStream]  # those that have something to send
    queued: bool
    closed: bool

    @property
    def can_send(self) -> bool:
        """Whether it may have another response on its way. Under the responder's lock."""

    def send(self, parcels: list[tuple[ResponseStream, list[Chunk]]]) -> None:
        """Send them all. Not under the lock; a failure is the bundle's own to deal with."""

    def poll(self) -> None:
        """Called every so often: see to a client that has gone, or that asks for nothing."""

    def shut(self) -> None:
        """End it: the responder is closing."""


class Responder:
    """Owns all sending. A send is a blocking round trip, so chunks that queue up are joined."""

    def __init__(self, poll_s: float = CANCEL_POLL_S, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._poll_s = poll_s
        self._keep_alive_s = keep_alive_s
        self._condition = threading.Condition()
        self._open: set[ResponseStream] = set()
        self._bundles: set[Bundle] = set()
        self._ready: deque[ResponseStream | Bundle] = deque()
        self._num_holding = 0
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_loop, name="shoal-responder", daemon=True),
            threading.Thread(target=self._poll_loop, name="shoal-cancel-poller", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        with self._condition:
            return len(self._open)

    def open(self, reply: Reply, stream: bool, every_token: bool = False) -> ResponseStream:
        """Start answering one request.

        Without ``stream`` everything goes out in one response. With ``every_token`` a chunk goes
        out even if its token made no text yet.
        """
        opened = ResponseStream(self, reply, stream, every_token, time.monotonic())
        with self._condition:
            self._open.add(opened)
        return opened

    def open_in(
        self, bundle: Bundle, reply: Reply, stream: bool, every_token: bool
    ) -> ResponseStream:
        """Start answering one request of a bundle; its client is the bundle's to watch."""
        opened = ResponseStream(self, reply, stream, every_token, time.monotonic(), bundle)
        with self._condition:
            self._open.add(opened)
        return opened

    def add_bundle(self, bundle: Bundle) -> None:
        """Poll it from now on, until it is closed."""
        with self._condition:
            self._bundles.add(bundle)

    def close_bundle(self, bundle: Bundle) -> None:
        """Forget it: what its requests still have to say is dropped. Idempotent."""
        with self._condition:
            bundle.closed = True
            self._bundles.discard(bundle)
            bundle.ready.clear()
            lost = [opened for opened in self._open if opened.bundle is bundle]
            for opened in lost:
                self._forget(opened)

    def resume(self, bundle: Bundle) -> None:
        """It can send again."""
        with self._condition:
            self._enqueue_bundle(bundle)

    def pulse(self, bundle: Bundle) -> None:
        """Have it send, whether its requests have something to say or not."""
        with self._condition:
            if not (bundle.queued or bundle.closed):
                bundle.queued = True
                self._ready.append(bundle)
                self._wake()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """While inside, the sending thread is not woken, so that what many requests gain together
        is sent together."""
        with self._condition:
            self._num_holding += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_holding -= 1
                if self._ready and not self._num_holding:
                    self._condition.notify_all()

    def watch(self, opened: ResponseStream, cancel: Callable[[], None]) -> None:
        """From now on call ``cancel``, once, when the client of ``opened`` has gone."""
        with self._condition:
            opened.cancel = cancel

    def post(self, opened: ResponseStream, chunk: Chunk) -> None:
        """Queue a chunk. Chunks after the final one are dropped."""
        with self._condition:
            if opened.closed or (opened.pending and opened.pending[-1].final):
                return
            opened.pending.append(chunk)
            if not opened.queued and opened.waits_for(chunk):
                self._enqueue(opened)

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait until every open request has its final response, then end the threads."""
        with self._condition:
            self._condition.wait_for(lambda: not self._open, timeout_s)
            left = list(self._open)
            bundles = list(self._bundles)
            self._stopping.set()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        for opened in left:
            if opened.bundle is None:
                self._give_up(opened)
        for bundle in bundles:
            bundle.shut()

    def _enqueue(self, opened: ResponseStream) -> None:
        if opened.queued:
            return
        opened.queued = True
        if opened.bundle is None:
            self._ready.append(opened)
            self._wake()
        else:
            opened.bundle.ready.append(opened)
            self._enqueue_bundle(opened.bundle)

    def _enqueue_bundle(self, bundle: Bundle) -> None:
        if bundle.ready and not bundle.queued and bundle.can_send:
            bundle.queued = True
            self._ready.append(bundle)
            self._wake()

    def _wake(self) -> None:
        if not self._num_holding:
            self._condition.notify_all()

    def _send_loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: (self._ready and not self._num_holding) or self._stopping.is_set()
                )
                if not self._ready:
                    return
                item = self._ready.popleft()
                item.queued = False
                if isinstance(item, ResponseStream):
                    chunks = self._take(item)
                else:
                    parcels = [(opened, self._take(opened)) for opened in item.ready]
                    item.ready.clear()
            if isinstance(item, ResponseStream):
                self._send(item, chunks)
            elif not item.closed:
                self._send_bundle(item, parcels)

    def _take(self, opened: ResponseStream) -> list[Chunk]:
        """What it has to say, by choice. Under the lock."""
        opened.queued = False
        chunks = join_by_choice(opened.pending)
        opened.pending = []
        return chunks

    def _send_bundle(
        self, bundle: Bundle, parcels: list[tuple[ResponseStream, list[Chunk]]]
    ) -> None:
        bundle.send(parcels)
        now = time.monotonic()
        with self._condition:
            for opened, chunks in parcels:
                opened.last_sent = now
                if any(chunk.final for chunk in chunks):
                    self._forget(opened)
            self._enqueue_bundle(bundle)

    def _forget(self, opened: ResponseStream) -> None:
        opened.closed = True
        self._open.discard(opened)
        self._condition.notify_all()

    def _send(self, opened: ResponseStream, chunks: list[Chunk]) -> None:
        final = any(chunk.final for chunk in chunks)
        try:
            opened.reply.send(*chunks)
        except Exception:
            # A fault with one client's answer is that client's alone.
            log.exception("a response could not be sent")
            self._send_failure(opened)
            final = True
        with self._condition:
            opened.last_sent = time.monotonic()
            if final:
                self._forget(opened)

    def _send_failure(self, opened: ResponseStream) -> None:
        self._cancel(opened)
        error = RequestError("The answer could not be sent.", code="internal_error", status=500)
        try:
            opened.reply.send(Chunk.of_error(error))
        except Exception:
            self._give_up(opened)

    def _give_up(self, opened: ResponseStream) -> None:
        try:
            opened.reply.abandon()
        except Exception:
            log.warning("a request was left without a final response", exc_info=True)

    def _poll_loop(self) -> None:
        while not self._stopping.wait(self._poll_s):
            with self._condition:
                waiting, bundles = list(self._open), list(self._bundles)
            now = time.monotonic()
            for opened in waiting:
                if opened.bundle is None:
                    self._poll(opened, now)
                elif opened.stream and now - opened.last_sent >= self._keep_alive_s:
                    self._keep_alive(opened)
            for bundle in bundles:
                self._poll_bundle(bundle)

    def _poll_bundle(self, bundle: Bundle) -> None:
        try:
            bundle.poll()
        except Exception:
            log.exception("the requests of one client could not be looked after")

    def _poll(self, opened: ResponseStream, now: float) -> None:
        if opened.closed or opened.cancel is None or opened.cancel_seen:
            return
        try:
            gone = opened.reply.is_cancelled()
        except Exception:
            log.exception("a request's state could not be read; it is cancelled")
            gone = True
        if gone:
            self._cancel(opened)
        elif opened.stream and now - opened.last_sent >= self._keep_alive_s:
            self._keep_alive(opened)

    def _cancel(self, opened: ResponseStream) -> None:
        if opened.cancel is not None and not opened.cancel_seen:
            opened.cancel_seen = True
            opened.cancel()

    def _keep_alive(self, opened: ResponseStream) -> None:
        with self._condition:
            if not opened.closed:
                self._enqueue(opened)
