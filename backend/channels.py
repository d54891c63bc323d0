"""Channels: all requests of one client process, answered together. See ``channel_messages``."""

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from shoal.backend.channel_messages import (
    IDLE_S,
    PULSE_S,
    UNREAD_PACE_S,
    WINDOW,
    ChannelDelta,
    ChannelError,
    ChannelNews,
    ChannelOrders,
    Submission,
)
from shoal.backend.chunk import Chunk
from shoal.backend.chunk_json import logprobs_json, tool_calls_json
from shoal.backend.orders import Sink
from shoal.backend.raw_request import RawRequest
from shoal.backend.responder import Responder, ResponseStream
from shoal.scheduler.errors import RequestError

LOOK_S = 0.25  # between two looks whether the client process is there: each asks the server
TEXTS = ("text", "reasoning", "logprobs", "prompt_logprobs", "tool_calls")

log = logging.getLogger(__name__)


class ChannelReply(Protocol):
    """The Triton request that is the channel. What is sent with ``final`` closes it."""

    def send_news(self, payload: bytes, final: bool) -> None: ...

    def is_cancelled(self) -> bool: ...

    def abandon(self) -> None: ...


class Requests(Protocol):
    """What a channel needs of the service."""

    def submit(self, raw: RawRequest, sink: Sink, waited_s: float = 0.0) -> int: ...

    def cancel(self, seq_id: int) -> None: ...


class _OnlyRef(msgspec.Struct):
    ref: int


class Slot:
    """One request of a channel, to the responder: all sending is the channel's."""

    def __init__(self, ref: int, wants_token_ids: bool) -> None:
        self.ref = ref
        self.wants_token_ids = wants_token_ids
        self.seq_id = 0
        self.has_ended = False

    def send(self, chunk: Chunk, *others: Chunk) -> None:
        raise NotImplementedError

    def is_cancelled(self) -> bool:
        return False

    def abandon(self) -> None:
        """Nothing of its own is open."""


class Channel:
    """The requests of one client process, as a Bundle of the responder.

    ``take`` runs in the thread that gets Triton's requests, ``send`` in the responder's, ``poll``
    in its poller's. ``_lock`` guards what they share; the responder's own lock may be taken before
    it, never after.
    """

    def __init__(
        self,
        reply: ChannelReply,
        responder: Responder,
        requests: Requests,
        on_closed: Callable[["Channel"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ready: deque[ResponseStream] = deque()
        self.queued = False
        self.closed = False
        self._reply = reply
        self._responder = responder
        self._requests = requests
        self._on_closed = on_closed
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: dict[int, Slot] = {}  # by ref, until its last delta is sent
        self._used_at = clock()
        self._num_sent = 0
        self._sent_at = self._looked_at = clock()
        self._num_read = 0
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def can_send(self) -> bool:
        if self.closed:
            return False
        is_paced = self._clock() - self._sent_at >= UNREAD_PACE_S
        return is_paced or self._num_sent - self._num_read < WINDOW

    def take(self, orders: ChannelOrders) -> bool:
        """Submit and cancel. False: the channel has just been closed, and nothing was taken."""
        with self._lock:
            if self.closed:
                return False
            self._used_at = self._clock()
            cancelled = [self._slots.get(ref) for ref in orders.cancellations]
            submitted = [self._add(raw) for raw in orders.submissions]
        for found in cancelled:
            if found is not None:
                self._requests.cancel(found.seq_id)
        for (slot, submission), waited_s in zip(submitted, orders.waited_s, strict=True):
            self._submit(slot, submission, waited_s)
        if orders.num_read > self._num_read:
            self._num_read = orders.num_read
            self._responder.resume(self)
        return True

    def send(self, parcels: list[tuple[ResponseStream, list[Chunk]]]) -> None:
        """One response with what these requests gained. A failure ends the channel."""
        deltas: list[ChannelDelta] = []
        ended: list[Slot] = []
        for opened, chunks in parcels:
            slot = opened.reply
            assert isinstance(slot, Slot)
            for chunk in chunks:
                deltas.append(channel_delta(slot, chunk))
                if chunk.final:
                    slot.has_ended = True
                    ended.append(slot)
        self._num_sent += 1
        self._sent_at = self._clock()
        try:
            self._reply.send_news(self._encode(deltas), False)
        except Exception:
            log.exception("a channel's response could not be sent")
            self.close()
            return
        with self._lock:
            for slot in ended:
                self._slots.pop(slot.ref, None)
            self._used_at = self._clock()

    def poll(self) -> None:
        """See whether the client has gone, or has had nothing to ask for a while."""
        if self._clock() - self._looked_at >= LOOK_S:
            self._looked_at = self._clock()
            if self._reply.is_cancelled():
                self.close()
                return
        if self.can_send:
            self._responder.resume(self)
            if self._slots and self._clock() - self._sent_at >= PULSE_S:
                self._responder.pulse(self)
        with self._lock:
            is_idle = not self._slots and self._clock() - self._used_at >= IDLE_S
            if is_idle:
                self.closed = True
        if is_idle:
            self.close(self._encoder.encode(ChannelNews(is_idle=True)))

    def shut(self) -> None:
        """End it with the service, when all requests have had their last response."""
        self.close()

    def close(self, last_words: bytes | None = None) -> None:
        """End the channel and all its requests. Idempotent."""
        with self._lock:
            self.closed = True
            slots, self._slots = list(self._slots.values()), {}
        self._on_closed(self)
        self._responder.close_bundle(self)
        for slot in slots:
            if not slot.has_ended:
                self._requests.cancel(slot.seq_id)
        try:
            if last_words is None:
                self._reply.abandon()
            else:
                self._reply.send_news(last_words, True)
        except Exception:
            log.warning("a channel was left without a final response", exc_info=True)

    def _add(self, raw: msgspec.Raw) -> tuple[Slot, Submission | None]:
        """Under the lock: from now on the channel is not idle. None: it cannot be read."""
        submission: Submission | None
        try:
            submission = msgspec.msgpack.decode(raw, type=Submission)
            slot = Slot(submission.ref, submission.return_token_ids)
        except (msgspec.MsgspecError, UnicodeError):
            slot, submission = Slot(msgspec.msgpack.decode(raw, type=_OnlyRef).ref, False), None
        self._slots[slot.ref] = slot
        return slot, submission

    def _submit(self, slot: Slot, submission: Submission | None, waited_s: float) -> None:
        if submission is None:
            opened = self._responder.open_in(self, slot, False, False)
            opened.post(Chunk.of_error(RequestError("The submission cannot be read.")))
        else:
            every_token = submission.return_token_ids or submission.return_logprobs
            opened = self._responder.open_in(self, slot, submission.stream, every_token)
            slot.seq_id = self._requests.submit(raw_request(submission), opened.post, waited_s)
            log.debug("request %d is %s", slot.seq_id, submission.request_id)
        if self.closed:  # meanwhile, by the poller
            self._requests.cancel(slot.seq_id)
            self._responder.close_bundle(self)

    def _encode(self, deltas: list[ChannelDelta]) -> bytes:
        try:
            return self._encoder.encode(ChannelNews(deltas))
        except UnicodeEncodeError:
            # Half of a surrogate pair (a client can send one in JSON) has no UTF-8 form.
            return self._encoder.encode(ChannelNews([_encodable(delta) for delta in deltas]))


class Channels:
    """The open channels of one model version, by their clients' names for them."""

    def __init__(self, responder: Responder, requests: Requests) -> None:
        self._responder = responder
        self._requests = requests
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def take(self, orders: ChannelOrders, reply: ChannelReply) -> None:
        """Carry out one message. ``reply`` becomes the channel, or is closed at once."""
        if orders.opens:
            channel = self._open(orders.channel, reply)
            channel.take(orders)
            return
        with self._lock:
            found = self._channels.get(orders.channel)
        if found is not None and found.take(orders):
            reply.abandon()
        else:
            reply.send_news(self._encoder.encode(ChannelNews(is_unknown=True)), True)

    def _open(self, name: str, reply: ChannelReply) -> Channel:
        def forget(channel: Channel) -> None:
            with self._lock:
                if self._channels.get(name) is channel:
                    del self._channels[name]

        channel = Channel(reply, self._responder, self._requests, forget)
        with self._lock:
            if name in self._channels:
                raise RequestError("channel is open already.", param="channel")
            self._channels[name] = channel
        self._responder.add_bundle(channel)
        return channel


def raw_request(submission: Submission) -> RawRequest:
    """What the intake reads. Whatever is cheap to tell is asked for."""
    return RawRequest(
        text_input=submission.text_input,
        messages=submission.messages,
        input_ids=submission.input_ids,
        stream=submission.stream,
        sampling_parameters=submission.sampling,
        parameters=submission.parameters,
        exclude_input_in_output=not submission.echo,
        return_finish_reason=True,
        return_logprobs=submission.return_logprobs,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_cached_tokens=True,
        return_token_ids=submission.return_token_ids,
        return_error=True,
    )


def _encodable(delta: ChannelDelta) -> ChannelDelta:
    texts = {name: getattr(delta, name) for name in TEXTS}
    clean = {
        name: text and text.encode("utf-8", "replace").decode() for name, text in texts.items()
    }
    return msgspec.structs.replace(delta, **clean)


def channel_delta(slot: Slot, chunk: Chunk) -> ChannelDelta:
    error = None if chunk.error is None else ChannelError(**chunk.error.to_dict())  # type: ignore[arg-type]
    embedding = chunk.embedding
    return ChannelDelta(
        slot.ref,
        chunk.text,
        chunk.index or 0,
        list(chunk.token_ids) if slot.wants_token_ids else [],
        chunk.num_new_tokens,
        chunk.num_input_tokens,
        chunk.cached_tokens,
        None if chunk.finish_reason is None else chunk.finish_reason.value,
        logprobs_json(chunk.logprobs) if chunk.logprobs else None,
        logprobs_json(chunk.prompt_logprobs) if chunk.prompt_logprobs else None,
        tool_calls_json(chunk.tool_calls) if chunk.tool_calls else None,
        chunk.reasoning,
        struct.pack(f"<{len(embedding)}f", *embedding) if embedding else b"",
        error,
    )
