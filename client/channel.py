"""A channel to a served model: all requests of this process over one gRPC stream.

Orders go out in small requests, as many at once as have come together; what the requests gained
comes back in the responses of one request that stays open, all of a step in one. See
``backend/channel_messages`` for the messages and what ends a channel.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import msgspec

from shoal.backend.channel_messages import TELL_WAIT_MS, ChannelOrders
from shoal.client import errors, tensors
from shoal.client.channel_stream import ChannelStream, Opening
from shoal.client.channel_wire import ChannelWire
from shoal.client.errors import ShoalError

logger = logging.getLogger("shoal.channel")

MAX_MESSAGE_BYTES = 8 * 2**20  # of submissions that travel together, unless one alone has more
MAX_RESUBMITS = 5
# A channel that has just ended may refuse orders before its last response is here.
LEAVE_S = 0.25
SEND_TIMEOUT_S = 30.0

Start = Callable[[AsyncIterator[Any]], Any]


class ModelChannel:
    """All requests of this process to one model. Belongs to an event loop.

    A channel is opened when it is first needed, and again after it has ended. ``version`` may be
    empty: the server's choice, which may change meanwhile; a request stays where it was taken.
    Each channel has a gRPC stream of its own, which carries nothing else: a version that is being
    unloaded takes no orders, and the end of that stream is all that can still be said to it.
    """

    def __init__(self, start: Start, model: str, version: str = "") -> None:
        """``start`` begins a ModelStreamInfer call with the requests that an iterator gives."""
        self._start = start
        self._model = model
        self._version = version
        self._refs = itertools.count(1)
        self._messages = itertools.count(1)
        self._streams: dict[int, ChannelStream] = {}
        self._openings: dict[str, Opening] = {}  # by id, until they have ended
        self._current: Opening | None = None  # what new requests go to
        self._tasks: set[asyncio.Task[None]] = set()  # one for each gRPC stream
        self._wire = ChannelWire(model)

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
        encoded = self._wire.submission(
            ref,
            text_input=text_input,
            messages=messages,
            input_ids=input_ids,
            sampling=sampling,
            stream=stream,
            return_logprobs=return_logprobs,
            echo=echo,
            parameters=parameters,
            request_id=request_id,
        )
        opened = ChannelStream(self.drop, ref, encoded, tensors.num_choices(sampling))
        self._streams[ref] = opened
        self._submit(opened)
        return opened

    def drop(self, stream: ChannelStream) -> None:
        """Let the backend end a request, and forget it."""
        if self._streams.pop(stream.ref, None) is None:
            return
        opening = stream.opening
        assert opening is not None
        if stream in opening.to_submit:
            opening.to_submit.remove(stream)
        elif opening.is_closed_to_orders:
            self._leave_later(opening)
        elif not opening.has_ended:
            opening.cancellations.append(stream.ref)
            opening.wanted.set()

    def fail_silent(self, num_looks: int) -> None:
        """Give up what was found silent so many times; to be called every so often. Of a process
        that has died while its version was being unloaded nothing else would ever be heard."""
        for opening in list(self._openings.values()):
            opening.num_silent += 1
            if opening.num_silent > num_looks and self._requests_of(opening):
                text = f"The model {self._model!r} stopped answering."
                self._end_all_of(opening, errors.unavailable(text))
                opening.call.cancel()

    def reset(self, error: ShoalError) -> None:
        """End all requests with this error, and the gRPC streams with them."""
        for opening in list(self._openings.values()):
            self._forget(opening)
        tasks, self._tasks = self._tasks, set()
        streams, self._streams = list(self._streams.values()), {}
        for task in tasks:
            task.cancel()
        for stream in streams:
            stream.end(error)

    async def close(self) -> None:
        """End the gRPC streams; what still runs is cancelled."""
        tasks = list(self._tasks)
        self.reset(errors.unavailable("The connection was closed."))
        await asyncio.gather(*tasks, return_exceptions=True)

    def _submit(self, stream: ChannelStream) -> None:
        opening = self._current
        if opening is None:
            opening = self._current = Opening(uuid.uuid4().hex)
            self._openings[opening.id] = opening
            task = asyncio.create_task(self._run(opening), name=f"channel to {self._model}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        stream.num_submits += 1
        stream.opening = opening
        opening.to_submit.append(stream)
        opening.wanted.set()

    async def _run(self, opening: Opening) -> None:
        """Read a gRPC stream to its end, which ends all requests of its channel."""
        while not opening.to_submit:
            opening.wanted.clear()
            await opening.wanted.wait()
            if opening.has_ended:
                return
        call = opening.call = self._start(_held_open(self._submission_message(opening), opening))
        sender = asyncio.create_task(self._send_orders(opening))
        try:
            failure = errors.unavailable(
                "The model server ended the answer before it was finished."
            )
            async for response in call:
                self._take(opening, response)
        except grpc.RpcError as error:
            failure = errors.from_grpc(error.code().name, error.details())
        except asyncio.CancelledError:
            # gRPC raises this for its own cancellation too, not only for that of our task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                call.cancel()
                raise
            failure = errors.from_grpc("CANCELLED", "the call was cancelled")
        except Exception:
            logger.exception("the channel to %s failed", self._model)
            failure = ShoalError("The model server sent a malformed response.", 502, "bad_gateway")
            call.cancel()
        else:
            if opening.was_idle:  # what was on its way comes back, and goes to the next channel
                await sender
        finally:
            sender.cancel()
        self._end_all_of(opening, failure)

    async def _send_orders(self, opening: Opening) -> None:
        """One message after another, as they come to be wanted, so that they arrive in order.

        Each in a call of its own: where tritonserver (2.51) refuses a message while it sends a
        response of the same call, it writes both at once, and that ends its process.
        """
        while not opening.has_ended:
            message = self._next_message(opening)
            if message is None:
                opening.wanted.clear()
                await opening.wanted.wait()
                continue
            failure: ShoalError | None = None
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    async for response in self._start(_once(message)):
                        self._take(opening, response)
            except grpc.RpcError as error:
                failure = errors.from_grpc(error.code().name, error.details())
            except TimeoutError:
                failure = errors.unavailable("The model server did not take the request.")
            except asyncio.CancelledError:  # gRPC's own, unless it is our task's
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                failure = errors.from_grpc("CANCELLED", "the call was cancelled")
            except Exception:
                logger.exception("an order to %s failed", self._model)
                opening.call.cancel()  # nothing else would tell those that wait
                return
            if failure is not None:
                self._end_those(self._sent_with(opening, message.id), failure)

    def _take(self, opening: Opening, response: Any) -> None:
        if response.error_message:
            self._refused(opening, response.infer_response.id, response.error_message)
        else:
            self._read(opening, response.infer_response)

    def _next_message(self, opening: Opening) -> Any | None:
        if opening.to_submit:
            return self._submission_message(opening)
        if opening.has_orders and opening.message_id and not opening.has_ended:
            return self._order_message(opening)
        return None

    def _submission_message(self, opening: Opening) -> Any:
        message_id = str(next(self._messages))
        opens = not opening.message_id
        if opens:
            opening.message_id = message_id
        batch: list[msgspec.Raw] = []
        waited_ms: list[int] = []
        size = 0
        while opening.to_submit and (not batch or size < MAX_MESSAGE_BYTES):
            stream = opening.to_submit.pop(0)
            stream.message_id = message_id
            batch.append(msgspec.Raw(stream.encoded))
            waited_ms.append(stream.age_ms)
            size += len(stream.encoded)
        if max(waited_ms) < TELL_WAIT_MS:
            waited_ms.clear()
        # Nothing else travels with them: they may go to another version than has the channel.
        orders = ChannelOrders(opening.id, opens, batch, waited_ms=waited_ms)
        return self._wire.request(orders, message_id, self._version)

    def _order_message(self, opening: Opening) -> Any:
        cancellations, opening.cancellations = opening.cancellations, []
        opening.num_acknowledged = opening.num_read
        orders = ChannelOrders(opening.id, cancellations=cancellations, num_read=opening.num_read)
        # To the version that has the channel, which need no longer be the server's choice.
        version = opening.version or self._version
        return self._wire.request(orders, str(next(self._messages)), version)

    def _read(self, opening: Opening, response: Any) -> None:
        news = self._wire.news(response)
        if news.is_unknown:
            self._unknown(opening, response.id)
            return
        if response.id != opening.message_id or opening.has_ended:
            return
        opening.version = response.model_version
        opening.num_silent = 0
        if response.parameters["triton_final_response"].bool_param:
            self._ended(opening, news.is_idle)
            return
        opening.num_read += 1
        for delta in news.deltas:
            stream = self._streams.get(delta.ref)
            if stream is not None and stream.take(delta):
                self._streams.pop(delta.ref, None)
        if opening.has_orders:
            opening.wanted.set()

    def _ended(self, opening: Opening, is_idle: bool) -> None:
        """The channel is no more. One that was idle had no requests; those on their way to it come
        back as unknown, those that wait go to the next."""
        opening.was_idle = is_idle
        waiting, opening.to_submit = opening.to_submit, []
        self._forget(opening)
        for stream in waiting:
            self._submit(stream)
        if not is_idle:
            text = "The model server ended the answer before it was finished."
            self._end_those(self._requests_of(opening), errors.unavailable(text))

    def _forget(self, opening: Opening) -> None:
        opening.end()
        self._openings.pop(opening.id, None)
        if self._current is opening:
            self._current = None

    def _end_all_of(self, opening: Opening, error: ShoalError) -> None:
        opening.to_submit.clear()
        self._forget(opening)
        self._end_those(self._requests_of(opening), error)

    def _unknown(self, opening: Opening, message_id: str) -> None:
        """A process that does not have the channel got a message. Submissions go again, in a new
        channel: another version answers now, and the channel's own may still have it, for what runs
        there. An order went to one that has just ended, or whose version was loaded anew."""
        sent = self._sent_with(opening, message_id)
        if sent and opening is self._current:
            self._current = None
        if not sent:
            self._close_to_orders(opening)
        for stream in sent:
            if stream.num_submits > MAX_RESUBMITS:
                text = "The model server did not take the request."
                self._end_those([stream], errors.unavailable(text))
            else:
                self._submit(stream)

    def _refused(self, opening: Opening, message_id: str, text: str) -> None:
        """tritonserver itself, or a stub that is dead, would not take a message."""
        error = errors.from_tritonserver(text, self._model)
        if not message_id or message_id == opening.message_id:
            self._end_all_of(opening, error)
            return
        lost = self._sent_with(opening, message_id)
        self._end_those(lost, error)
        if not lost:
            self._close_to_orders(opening)

    def _close_to_orders(self, opening: Opening) -> None:
        opening.is_closed_to_orders = True
        if self._current is opening:
            self._current = None
        self._leave_later(opening)

    def _leave_later(self, opening: Opening) -> None:
        asyncio.get_running_loop().call_later(LEAVE_S, self._leave, opening)

    def _leave(self, opening: Opening) -> None:
        """End the gRPC stream if nobody waits for anything that it carries. What was cancelled
        beside others that go on is not told, and goes on too."""
        if not (opening.has_ended or opening.to_submit or self._requests_of(opening)):
            self._forget(opening)
            opening.call.cancel()

    def _requests_of(self, opening: Opening) -> list[ChannelStream]:
        return [stream for stream in self._streams.values() if stream.opening is opening]

    def _sent_with(self, opening: Opening, message_id: str) -> list[ChannelStream]:
        """The requests that went with a message and have not been heard of since."""
        return [
            stream
            for stream in self._requests_of(opening)
            if stream.message_id == message_id and stream.encoded
        ]

    def _end_those(self, streams: list[ChannelStream], error: ShoalError) -> None:
        for stream in streams:
            self._streams.pop(stream.ref, None)
            stream.end(error)


async def _held_open(message: Any, opening: Opening) -> AsyncIterator[Any]:
    yield message
    await opening.over.wait()


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
