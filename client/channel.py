"""A channel to a served model: all requests of this process over one gRPC stream.

Orders go out in small requests, as many at once as have come together; what the requests gained
comes back in the responses of one request that stays open, all of a step in one. See
``backend/channel_messages`` for the messages and what ends a channel.
"""

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import msgspec
from tritonclient.grpc import service_pb2

from shoal.backend.channel_messages import (
    ACK_EVERY,
    ChannelDelta,
    ChannelOrders,
    ReadNews,
    Submission,
)
from shoal.client import errors, tensors
from shoal.client.errors import ShoalError
from shoal.client.types import Delta

logger = logging.getLogger("shoal.channel")

MAX_MESSAGE_BYTES = 8 * 2**20  # of submissions that travel together, unless one alone has more
MAX_RESUBMITS = 5
JOIN_ABOVE = 8  # deltas that wait for their reader; more are joined where they are plain text
# A reader so far behind is cut off. No answer of text alone is as long.
MAX_WAITING_BYTES = 8 * 2**20

Start = Callable[[AsyncIterator[Any]], Any]


class ChannelStream:
    """The deltas of one request. Close it (or leave its ``async with``) to cancel the request.

    Ends when every choice has had a finish reason; raises ShoalError on any other end.
    """

    def __init__(self, channel: "ModelChannel", ref: int, encoded: bytes, num_choices: int) -> None:
        self.ref = ref
        self.encoded = encoded  # the submission, until the backend is known to have it
        self.opening: Opening | None = None  # where it was sent to
        self.message_id = ""
        self.num_submits = 0
        self._channel = channel
        self._num_unfinished = num_choices
        self._waiting: deque[Delta] = deque()
        self._waiting_bytes = 0
        self._failure: ShoalError | None = None
        self._ended = False  # nothing more comes
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> "ChannelStream":
        return self

    async def __aenter__(self) -> "ChannelStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> Delta:
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

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._channel.drop(self)
        self._waiting.clear()

    def fail(self, error: ShoalError) -> None:
        """Cancel the request and let its reader see ``error``; nothing if it has ended."""
        if not self._ended:
            self._channel.drop(self)
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
        self._put(_delta(told))
        if told.finish_reason is not None:
            self._num_unfinished -= 1
        if self._num_unfinished <= 0:
            self.end(None)
            return True
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self.fail(ShoalError("The answer was not read for too long.", 408, "too_slow"))
        return False

    def _put(self, delta: Delta) -> None:
        waiting = self._waiting
        self._waiting_bytes += _size(delta)
        if len(waiting) >= JOIN_ABOVE and _can_join(waiting[-1], delta):
            waiting[-1] = _joined(waiting[-1], delta)
        else:
            waiting.append(delta)
        self._wake()

    def _next(self) -> Delta:
        delta = self._waiting.popleft()
        self._waiting_bytes -= _size(delta)
        return delta

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(eq=False, slots=True)
class Opening:
    """One channel, from the request that opens it to its last response."""

    id: str
    message_id: str = ""  # of the request that is the channel
    version: str = ""  # the one that answers; empty: not known yet
    num_read: int = 0
    num_acknowledged: int = 0
    cancellations: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def has_orders(self) -> bool:
        owes = self.num_read - self.num_acknowledged >= ACK_EVERY
        return not self.has_ended and (owes or bool(self.cancellations))


class ModelChannel:
    """All requests of this process to one model. Belongs to an event loop.

    The gRPC stream is made when it is first needed, and again after a failure. ``version`` may be
    empty: the server's choice, which may change meanwhile; a request stays where it was taken.
    """

    def __init__(self, start: Start, model: str, version: str = "") -> None:
        """``start`` begins a ModelStreamInfer call with the requests that an iterator gives."""
        self._start = start
        self._model = model
        self._version = version
        self._refs = itertools.count(1)
        self._messages = itertools.count(1)
        self._streams: dict[int, ChannelStream] = {}
        self._to_submit: list[ChannelStream] = []
        self._openings: dict[str, Opening] = {}  # by id, until they have ended
        self._current: Opening | None = None  # what new requests go to
        self._wanted = asyncio.Event()  # there are orders to send
        self._run_number = 0  # of the gRPC stream, so that the iterator of an old one ends
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ReadNews)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def generate(
        self,
        *,
        text_input: str | None = None,
        messages: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        stream: bool = True,
        return_logprobs: bool = False,
        echo: bool = False,
        parameters: Mapping[str, str | int | bool] | None = None,
        request_id: str = "",
    ) -> ChannelStream:
        """Start one request and return its deltas; one delta with everything unless ``stream``.

        Give exactly one of ``text_input``, ``messages`` (JSON) and ``input_ids``. Raises ShoalError
        on wrong types.
        """
        ref = next(self._refs)
        submission = Submission(
            ref,
            _utf8("text_input", text_input),
            _utf8("messages", messages),
            _token_ids(input_ids),
            tensors.encode_sampling({**(sampling or {})}).encode(),
            stream,
            return_logprobs,
            False,
            echo,
            dict(parameters or {}),
            request_id,
        )
        try:
            encoded = self._encoder.encode(submission)
        except (UnicodeEncodeError, TypeError, OverflowError) as error:
            raise ShoalError("The request cannot be sent.", 400, detail=str(error)) from None
        wanted = (sampling or {}).get("n")
        num_choices = wanted if isinstance(wanted, int) and wanted > 1 else 1
        opened = ChannelStream(self, ref, encoded, num_choices)
        self._streams[ref] = opened
        self._submit(opened)
        return opened

    def drop(self, stream: ChannelStream) -> None:
        """Let the backend end a request, and forget it."""
        if self._streams.pop(stream.ref, None) is None:
            return
        if stream in self._to_submit:
            self._to_submit.remove(stream)
        elif stream.opening is not None and not stream.opening.has_ended:
            stream.opening.cancellations.append(stream.ref)
            self._wanted.set()

    def reset(self, error: ShoalError) -> None:
        """End all requests with this error, and the gRPC stream with them."""
        call, self._call = self._call, None
        self._run_number += 1
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._lose(error)
        if call is not None:
            call.cancel()

    async def close(self) -> None:
        """End the gRPC stream; what still runs is cancelled."""
        task = self._task
        self.reset(errors.unavailable("The connection was closed."))
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _submit(self, stream: ChannelStream) -> None:
        stream.num_submits += 1
        self._to_submit.append(stream)
        self._wanted.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"channel to {self._model}")

    async def _run(self) -> None:
        """Read the channel until the gRPC stream ends, which ends all requests."""
        self._run_number += 1
        call = self._call = self._start(self._requests(self._run_number))
        try:
            async for response in call:
                if response.error_message:
                    self._refused(response.infer_response.id, response.error_message)
                else:
                    self._read(response.infer_response)
            failure = errors.unavailable(
                "The model server ended the answer before it was finished."
            )
        except grpc.RpcError as error:
            failure = errors.from_grpc(error.code().name, error.details())
        except asyncio.CancelledError:
            # gRPC raises this for its own cancellation too, not only for that of our task.
            task = asyncio.current_task()
            if task is None or task.cancelling() or self._call is not call:
                raise
            failure = errors.from_grpc("CANCELLED", "the call was cancelled")
        except Exception:
            logger.exception("the channel to %s failed", self._model)
            failure = ShoalError("The model server sent a malformed response.", 502, "bad_gateway")
            call.cancel()
        if self._call is call:
            self._call = self._task = None
            self._run_number += 1
            self._lose(failure)

    def _lose(self, error: ShoalError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        self._to_submit.clear()
        self._openings.clear()
        self._current = None
        for stream in streams:
            stream.end(error)

    async def _requests(self, run_number: int) -> AsyncIterator[Any]:
        """What this side of the gRPC stream says, as it comes to be wanted."""
        while self._run_number == run_number:
            message = self._next_message()
            if message is not None:
                yield message
            else:
                self._wanted.clear()
                await self._wanted.wait()

    def _next_message(self) -> Any | None:
        if self._to_submit:
            return self._submission_message()
        for opening in self._openings.values():
            if opening.has_orders:
                return self._order_message(opening)
        return None

    def _submission_message(self) -> Any:
        current = self._current
        opens = current is None
        if current is None:
            current = self._current = Opening(uuid.uuid4().hex)
            self._openings[current.id] = current
        message_id = str(next(self._messages))
        if opens:
            current.message_id = message_id
        batch, size = [], 0
        while self._to_submit and (not batch or size < MAX_MESSAGE_BYTES):
            stream = self._to_submit.pop(0)
            stream.opening, stream.message_id = current, message_id
            batch.append(msgspec.Raw(stream.encoded))
            size += len(stream.encoded)
        # Nothing else travels with them: they may go to another version than has the channel.
        orders = ChannelOrders(current.id, opens, batch)
        return self._message(orders, message_id, self._version)

    def _order_message(self, opening: Opening) -> Any:
        cancellations, opening.cancellations = opening.cancellations, []
        opening.num_acknowledged = opening.num_read
        orders = ChannelOrders(opening.id, cancellations=cancellations, num_read=opening.num_read)
        # To the version that has the channel, which need no longer be the server's choice.
        version = opening.version or self._version
        return self._message(orders, str(next(self._messages)), version)

    def _message(self, orders: ChannelOrders, message_id: str, version: str) -> Any:
        data = self._encoder.encode(orders)
        request = service_pb2.ModelInferRequest(
            model_name=self._model,
            model_version=version,
            id=message_id,
            raw_input_contents=[data],
        )
        request.inputs.add(name="channel", datatype="UINT8", shape=[len(data)])
        if orders.opens:
            request.parameters["triton_enable_empty_final_response"].bool_param = True
        return request

    def _read(self, response: Any) -> None:
        opening = next(
            (item for item in self._openings.values() if item.message_id == response.id), None
        )
        news = self._decoder.decode(
            response.raw_output_contents[0] if response.outputs else b"\x80"
        )
        if news.is_unknown:
            self._unknown(response.id)
            return
        if opening is None:
            return
        opening.version = response.model_version
        if response.parameters["triton_final_response"].bool_param:
            self._ended(opening, news.is_idle)
            return
        opening.num_read += 1
        for delta in news.deltas:
            stream = self._streams.get(delta.ref)
            if stream is not None and stream.take(delta):
                self._streams.pop(delta.ref, None)
        if opening.has_orders:
            self._wanted.set()

    def _ended(self, opening: Opening, is_idle: bool) -> None:
        """The channel is no more. One that was idle had no requests; those on their way to it come
        back as unknown."""
        self._forget(opening)
        if not is_idle:
            self._end_those(
                lambda stream: stream.opening is opening,
                errors.unavailable("The model server ended the answer before it was finished."),
            )

    def _forget(self, opening: Opening) -> None:
        opening.has_ended = True
        self._openings.pop(opening.id, None)
        if self._current is opening:
            self._current = None

    def _unknown(self, message_id: str) -> None:
        """A model version that does not have the channel got submissions: they go again, in a new
        channel. Without submissions it was an order for a channel that has just ended."""
        for stream in self._sent_with(message_id):
            if stream.opening is self._current:
                self._current = None  # its own version may still have it, for what runs there
            if stream.num_submits > MAX_RESUBMITS:
                self._streams.pop(stream.ref, None)
                stream.end(errors.unavailable("The model server did not take the request."))
            else:
                self._submit(stream)

    def _refused(self, message_id: str, text: str) -> None:
        """tritonserver itself, or a stub that is dead, would not take a message."""
        error = errors.from_tritonserver(text, self._model)
        for opening in list(self._openings.values()):
            if opening.message_id == message_id:
                self._forget(opening)
                self._end_those(lambda stream, lost=opening: stream.opening is lost, error)
        lost = self._sent_with(message_id) if message_id else list(self._streams.values())
        for stream in lost:
            self._streams.pop(stream.ref, None)
            stream.end(error)

    def _sent_with(self, message_id: str) -> list[ChannelStream]:
        """The requests that went with a message and have not been heard of since."""
        return [
            stream
            for stream in self._streams.values()
            if stream.message_id == message_id and stream.encoded
        ]

    def _end_those(self, which: Callable[[ChannelStream], bool], error: ShoalError) -> None:
        for stream in [stream for stream in self._streams.values() if which(stream)]:
            self._streams.pop(stream.ref, None)
            stream.end(error)


def _utf8(name: str, text: str | None) -> bytes | None:
    try:
        return None if text is None else text.encode()
    except UnicodeEncodeError:
        raise ShoalError(f"{name} holds text that is not valid Unicode.", 400) from None


def _token_ids(ids: Sequence[int] | None) -> list[int] | None:
    return None if ids is None else tensors.checked_token_ids(ids).tolist()


def _delta(told: ChannelDelta) -> Delta:
    return Delta(
        told.text,
        tuple(told.token_ids),
        told.num_output_tokens,
        told.num_input_tokens,
        told.num_cached_tokens,
        told.finish_reason,
        told.logprobs,
        told.prompt_logprobs,
        told.embedding,
        told.reasoning,
        told.tool_calls,
        None,
        told.index,
    )


def _size(delta: Delta) -> int:
    size = len(delta.text) + len(delta.reasoning) + len(delta.logprobs or "")
    return size + len(delta.tool_calls or "") + len(delta.prompt_logprobs or "")


def _can_join(first: Delta, second: Delta) -> bool:
    """Whether both are plain text of one choice, which goes on after the first."""
    return (
        first.index == second.index
        and first.finish_reason is None
        and not (first.logprobs or second.logprobs or first.prompt_logprobs)
        and not (first.tool_calls or second.tool_calls or first.reasoning or second.reasoning)
        and not (first.embedding or second.embedding or second.prompt_logprobs)
    )


def _joined(first: Delta, second: Delta) -> Delta:
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        num_output_tokens=first.num_output_tokens + second.num_output_tokens,
    )
