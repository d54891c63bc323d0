"""Reads a JSON request body within limits of size, depth and time."""

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from shoal.backend.strict_json import non_finite_field
from shoal.client.errors import ShoalError

LARGE_BODY_BYTES = 256 * 1024  # beyond, decoding would hold up the event loop


class ClientGoneError(Exception):
    """The client closed its connection; nobody is there to answer."""


async def read_json(request: Request, max_bytes: int, max_depth: int, timeout_s: float) -> Any:
    """Decode the body. Raises ShoalError 400, 408, 413 or 415."""
    check_content_type(request)
    try:
        async with asyncio.timeout(timeout_s):
            body = await read_limited(request, max_bytes)
    except TimeoutError:
        raise ShoalError("The body did not arrive in time.", 408, "request_timeout") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(decode_json, body, max_depth)
    return decode_json(body, max_depth)


def check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ShoalError(
            "The body must be JSON: send the header Content-Type: application/json.",
            415,
            "unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ShoalError(
            "Compressed bodies are not supported: leave out Content-Encoding.",
            415,
            "unsupported_media_type",
        )


async def read_limited(request: Request, max_bytes: int) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    length = request.headers.get("content-length", "0")
    too_large = ShoalError(f"The body must have at most {max_bytes} bytes.", 413, "body_too_large")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def decode_json(body: bytes, max_depth: int) -> Any:
    """Strict JSON (no NaN, no infinity) of bounded depth. Raises ShoalError (400)."""
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        culprit = non_finite_field(body)
        if culprit is not None:
            raise ShoalError(
                f"{culprit[:64]} must be a finite number; NaN and Infinity are not JSON.",
                400,
                "invalid_value",
                culprit[:64],
            ) from None
        where = f" at line {error.lineno}, column {error.colno}" if body else ""
        raise ShoalError(f"The body is not valid JSON{where}.", 400, "invalid_json") from None
    if is_deeper_than(values, max_depth):
        raise ShoalError(
            f"The body is nested too deeply: at most {max_depth} levels.", 400, "invalid_json"
        )
    return values


def is_deeper_than(value: Any, max_depth: int) -> bool:
    """Whether decoded JSON nests deeper. Goes level by level, so that it cannot recurse."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(max_depth):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) in (dict, list)
        ]
        if not level:
            return False
    return bool(level)
