"""ASGI middleware: request ids, drain, the count of open requests, one log line a request, or for
all that a door refuses in a second; and the doors of the models."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.client import errors
from shoal.client.openai.access import TIER_HEADER, request_parameters
from shoal.client.openai.answers import error_response, internal_error
from shoal.client.openai.door import Door

logger = logging.getLogger("shoal.openai.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
HEALTH_PREFIX = "/health/"
REFUSALS_LOGGED_S = 1.0
REFUSED = "refused_at_door"  # in a request's state
# Of these every request becomes work for a model.
GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}
)


class RequestTracker:
    """Counts open requests; once draining, takes no new ones but health checks."""

    def __init__(self) -> None:
        self.draining = False
        self.num_open = 0


class RefusalLog:
    """One line for what the doors refuse in a second: there is no limit to how much that may be."""

    def __init__(self) -> None:
        self._count = 0

    def note(self) -> None:
        """Count one; the line follows. Needs a running event loop."""
        self._count += 1
        if self._count == 1:
            asyncio.get_running_loop().call_later(REFUSALS_LOGGED_S, self._write)

    def _write(self) -> None:
        count, self._count = self._count, 0
        logger.info("%d requests in %.0f s refused at the door", count, REFUSALS_LOGGED_S)


class RequestMiddleware:
    """Gives each request an id (the client's own when it is well-formed) and answers with it."""

    def __init__(self, app: ASGIApp, tracker: RequestTracker) -> None:
        self._app = app
        self._tracker = tracker
        self._refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                # A client whose body is not read would go on sending it.
                if self._tracker.draining or status in (401, 408, 413):
                    headers["connection"] = "close"
            await send(message)

        if scope["path"].startswith(HEALTH_PREFIX):
            await self._app(scope, receive, send_with_id)
            return
        if self._tracker.draining:
            await error_response(errors.draining())(scope, receive, send_with_id)
            return
        self._tracker.num_open += 1
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s failed", request_id)
            if not status:
                await error_response(internal_error())(scope, receive, send_with_id)
        finally:
            self._tracker.num_open -= 1
            if REFUSED in scope["state"]:
                self._refusals.note()
            else:
                log_request(scope, status, (time.monotonic() - started) * 1000)


class DoorMiddleware:
    """Refuses before the body is read, when no model takes anything: its name is in the body."""

    def __init__(self, app: ASGIApp, doors: Callable[[], list[Door]]) -> None:
        self._app = app
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in GENERATION_PATHS:
            doors = self._doors() if scope["method"] == "POST" else []
            if doors and all(door.is_shut for door in doors):
                tier = str(request_parameters(Request(scope)).get(TIER_HEADER, ""))
                scope["state"][REFUSED] = True
                await error_response(doors[0].refusal(tier))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def log_request(scope: Scope, status: int, took_ms: float) -> None:
    logger.info(
        "%s %s %s %s %d %.0f ms",
        scope["state"]["request_id"],
        key_name(scope),
        scope["method"],
        scope["path"][:256].encode("unicode_escape").decode(),
        status or 499,  # 499: the client left before the first byte
        took_ms,
    )


def key_name(scope: Scope) -> str:
    """Whose key the request came with, for the log."""
    account = scope["state"].get("account")
    return "-" if account is None else str(account.key.name)


def request_id_of(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
