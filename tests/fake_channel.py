"""The channels of a FakeTriton, as ``backend/channels`` keeps them."""

import json
import struct
import threading
from typing import Any, Protocol

import msgspec

from shoal.backend.channel_messages import (
    ChannelDelta,
    ChannelError,
    ChannelNews,
    ChannelOrders,
    Submission,
)


class Carrier(Protocol):
    """The response side of the request that is a channel."""

    def send(self, outputs: list[tuple[str, str, list[int], bytes]], final: bool) -> None: ...

    def fail(self, text: str) -> None: ...


class FakeChannel:
    """One open channel. ``cancelled`` holds an event for each request, by ref."""

    def __init__(self, carrier: Carrier) -> None:
        self.cancelled: dict[int, threading.Event] = {}
        self.num_read = 0
        self.waited_s: dict[int, float] = {}  # by ref: told with its submission
        self.carrier = carrier

    def send(self, deltas: list[ChannelDelta], **end: bool) -> None:
        send_news(self.carrier, deltas, final=bool(end), **end)

    def end(self) -> None:
        """As the real one does when it has been idle."""
        self.send([], is_idle=True)


def read_orders(message: Any) -> ChannelOrders | None:
    """None for any other request."""
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        if tensor.name == "channel":
            assert tensor.datatype == "UINT8"
            return msgspec.msgpack.decode(raw, type=ChannelOrders)
    return None


def read_submissions(orders: ChannelOrders) -> list[Submission]:
    return [msgspec.msgpack.decode(raw, type=Submission) for raw in orders.submissions]


def inputs_of(submission: Submission) -> dict[str, Any]:
    """As the same request has them that comes alone."""
    inputs: dict[str, Any] = {"sampling_parameters": submission.sampling.decode()}
    for name in ("text_input", "messages"):
        text = getattr(submission, name)
        if text is not None:
            inputs[name] = text.decode()
    if submission.input_ids is not None:
        inputs["input_ids"] = submission.input_ids
    inputs |= {"stream": submission.stream, "exclude_input_in_output": not submission.echo}
    if submission.return_logprobs:
        inputs["return_logprobs"] = True
    return inputs


def send_news(
    carrier: Carrier, deltas: list[ChannelDelta], final: bool = False, **news: bool
) -> None:
    raws = [msgspec.Raw(msgspec.msgpack.encode(delta)) for delta in deltas]
    payload = msgspec.msgpack.encode(ChannelNews(raws, **news))
    carrier.send([("channel_output", "UINT8", [len(payload)], payload)], final)


def piece_deltas(
    ref: int, piece: Any, wants_logprobs: bool, num_input_tokens: int, num_cached_tokens: int
) -> list[ChannelDelta]:
    """What a piece of an answer, and those beside it, say."""
    return [
        ChannelDelta(
            ref,
            part.text,
            part.index or 0,
            num_output_tokens=part.num_tokens,
            num_input_tokens=num_input_tokens,
            num_cached_tokens=num_cached_tokens,
            finish_reason=part.finish_reason if part.error is None else "error",
            logprobs=_json(part.logprobs) if wants_logprobs else None,
            prompt_logprobs=_json(part.prompt_logprobs),
            tool_calls=_json(part.tool_calls),
            reasoning=part.reasoning,
            embedding=struct.pack(f"<{len(part.embedding)}f", *part.embedding),
            error=None if part.error is None else msgspec.convert(part.error, ChannelError),
        )
        for part in (piece, *piece.beside)
    ]


def _json(items: tuple[Any, ...]) -> str | None:
    return json.dumps(items) if items else None
