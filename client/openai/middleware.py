"""ASGI middleware: request ids, drain, the count of open requests, one log line a request; and the
doors of the models."""

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
# Of these every request becomes work for a model.
GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}
)


class RequestTracker:
    """Counts open requests; once draining, takes no new ones but health checks."""

    def __init__(self) -> None:
        self.draining = False
        self.num_open = 0


class RequestMiddleware:
    """Gives each request an id (the client's own when it is well-formed) and answers with it."""

    def __init__(self, app: ASGIApp, tracker: RequestTracker) -> None:
        self._app = app
        self._tracker = tracker

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
            logger.info(
                "%s %s %s %s %d %.0f ms",
                request_id,
                key_name(scope),
                scope["method"],
                scope["path"][:256].encode("unicode_escape").decode(),
                status or 499,  # 499: the client left before the first byte
                (time.monotonic() - started) * 1000,
            )


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
                await error_response(doors[0].refusal(tier))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def key_name(scope: Scope) -> str:
    """Whose key the request came with, for the log."""
    account = scope["state"].get("account")
    return "-" if account is None else str(account.key.name)


def request_id_of(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
