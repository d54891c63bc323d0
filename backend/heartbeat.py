"""Answers control requests: the state of the service once, or as a stream of heartbeats."""

import heapq
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.scheduler.errors import RequestError

MIN_INTERVAL_MS, MAX_INTERVAL_MS, DEFAULT_INTERVAL_MS = 50, 5000, 250
MAX_COUNT, DEFAULT_COUNT = 240, 20
MAX_CONTROL_LENGTH = 4096  # bytes
MAX_HEARTBEAT_STREAMS = 64

log = logging.getLogger(__name__)


class ControlReply(Protocol):
    """Where the answers to one control request go; the one sent with ``final`` closes it."""

    def send_control(self, payload: str, final: bool) -> None: ...

    def is_cancelled(self) -> bool: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """``count`` answers, one each ``interval_ms``, the first at once.

    ``refused``: requests by tier that whoever asks refused by himself since he asked last.
    """

    interval_ms: int = DEFAULT_INTERVAL_MS
    count: int = 1
    refused: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> "ControlRequest":
        """Decode the ``control`` input. Raises RequestError, naming the field."""
        values = _decode_object(text)
        op = values.pop("op", None)
        if op not in ("heartbeat", "status"):
            raise RequestError('control.op must be "heartbeat" or "status".', param="control.op")
        allowed = {"interval_ms", "count", "refused"} if op == "heartbeat" else set()
        unknown = sorted(set(values) - allowed)
        if unknown:
            raise RequestError(
                f"Unknown field {unknown[0][:64]!r} in control for op {op!r}.",
                param=f"control.{unknown[0][:64]}",
                code="unknown_parameter",
            )
        if op == "status":
            return cls()
        interval_ms = values.get("interval_ms", DEFAULT_INTERVAL_MS)
        count = values.get("count", DEFAULT_COUNT)
        _check_int("control.interval_ms", interval_ms, MIN_INTERVAL_MS, MAX_INTERVAL_MS)
        _check_int("control.count", count, 1, MAX_COUNT)
        refused = values.get("refused", {})
        if not isinstance(refused, dict):
            raise RequestError("control.refused must map tiers to counts.", param="control.refused")
        for num_refused in refused.values():
            _check_int("control.refused", num_refused, 0, 2**31)
        return cls(interval_ms, count, refused)


@dataclass(order=True, slots=True)
class _Beat:
    due: float
    order: int
    interval_s: float = field(compare=False)
    left: int = field(compare=False)
    reply: ControlReply = field(compare=False)


class HeartbeatThread:
    """Sends heartbeats from a thread of its own, so that a busy responder does not look dead.

    Every stream of beats is bounded: an open response keeps the server from unloading the model.
    """

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status
        self._beats: list[_Beat] = []
        self._order = itertools.count()
        self._condition = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="shoal-heartbeat", daemon=True)
        self._thread.start()

    def add(self, request: ControlRequest, reply: ControlReply) -> None:
        """Answer a control request. Raises RequestError when too many are being answered."""
        beat = _Beat(
            time.monotonic(), next(self._order), request.interval_ms / 1000, request.count, reply
        )
        with self._condition:
            if self._stopping or len(self._beats) >= MAX_HEARTBEAT_STREAMS:
                raise RequestError(
                    f"At most {MAX_HEARTBEAT_STREAMS} heartbeat streams can be open at once.",
                    code="too_many_heartbeats",
                    status=429,
                    retry_after_ms=1000,
                )
            heapq.heappush(self._beats, beat)
            self._condition.notify()

    def close(self) -> None:
        """Send each open stream its last beat and end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(5)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._wait_until_due()
                if self._stopping:
                    break
                beat = heapq.heappop(self._beats)
            if self._send(beat, final=beat.left == 1):
                with self._condition:
                    heapq.heappush(self._beats, beat)
        for beat in self._beats:
            self._send(beat, final=True)

    def _wait_until_due(self) -> None:
        while not self._stopping:
            if not self._beats:
                self._condition.wait()
                continue
            delay = self._beats[0].due - time.monotonic()
            if delay <= 0:
                return
            self._condition.wait(delay)

    def _send(self, beat: _Beat, final: bool) -> bool:
        """Send one beat; whether another is to follow."""
        try:
            final = final or beat.reply.is_cancelled()
            beat.reply.send_control(json.dumps(self._status()), final)
        except Exception:
            log.exception("a heartbeat could not be sent")
            self._give_up(beat)
            return False
        beat.left -= 1
        # A late beat is not made up for by two at once.
        beat.due = max(beat.due + beat.interval_s, time.monotonic())
        return not final

    def _give_up(self, beat: _Beat) -> None:
        try:
            beat.reply.abandon()
        except Exception:
            log.warning("a heartbeat stream was left open", exc_info=True)


def _decode_object(text: str) -> dict[str, Any]:
    if len(text) > MAX_CONTROL_LENGTH:
        raise RequestError(f"control takes at most {MAX_CONTROL_LENGTH} bytes.", param="control")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("control must be valid JSON.", param="control") from None
    if not isinstance(values, dict):
        raise RequestError("control must be a JSON object.", param="control", code="invalid_type")
    return values


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number in [{low}, {high}].", param=name)
