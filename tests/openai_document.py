"""Every answer of the OpenAI endpoints that a test gets, against OpenAI's published document.

``data/openai_schemas.json`` is cut out of it by ``data/cut_openai_schemas.py`` (MIT). Fields of
ours beside OpenAI's are allowed: its objects are open. ``AMENDMENTS`` are the places where the
document says less than OpenAI's own service and its prose do.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from shoal.client.openai.http_protocol import BODY_WRITER, BodyWriter, body_writer

DOCUMENT = Path(__file__).parent / "data" / "openai_schemas.json"

# Method and path: the schemas of a whole answer and of a stream's event.
SCHEMAS = {
    "POST /v1/chat/completions": (
        "CreateChatCompletionResponse",
        "CreateChatCompletionStreamResponse",
    ),
    "POST /v1/completions": ("CreateCompletionResponse", "CreateCompletionStreamResponse"),
    "POST /v1/responses": ("Response", "ResponseStreamEvent"),
    "GET /v1/responses/": ("Response", ""),
    "POST /v1/embeddings": ("CreateEmbeddingResponse", ""),
    "GET /v1/models": ("ListModelsResponse", ""),
    "GET /v1/models/": ("Model", ""),
}

METHODS = ("GET", "POST", "DELETE")

Schemas = dict[str, dict[str, Any]]


def check_answer(method: str, path: str, status: int, content_type: str, body: bytes) -> None:
    """Raise AssertionError unless the answer is as the document has it. Of a stream that the
    client left early, the whole events count."""
    if not path.startswith("/v1/") or method not in METHODS or status == 499:
        return
    names = SCHEMAS.get(f"{method} {path}") or SCHEMAS.get(
        f"{method} {path[: _second_slash(path)]}"
    )
    if status >= 400:
        check_value("ErrorResponse", json.loads(body))
    elif names is not None and content_type.startswith("text/event-stream"):
        check_events(names[1], body)
    elif names is not None:
        check_value(names[0], json.loads(body))


def _second_slash(path: str) -> int:
    return path.find("/", len("/v1/")) + 1


def check_events(name: str, body: bytes) -> None:
    events = body.split(b"\n\n")[:-1]  # what follows the last empty line is cut off
    for number, event in enumerate(events):
        *head, data = event.split(b"\n")
        assert data.startswith(b"data: "), event
        if data == b"data: [DONE]":
            assert number == len(events) - 1, "events after [DONE]"
            continue
        value = json.loads(data.removeprefix(b"data: "))
        if name == "ResponseStreamEvent":
            assert head == [f"event: {value['type']}".encode()], event
            assert value["sequence_number"] == number, event
            check_value(_event_schemas()[value["type"]], value)
        else:
            assert head == [], event
            check_value("ErrorResponse" if "error" in value else name, value)


def check_value(name: str, value: Any) -> None:
    """Raise AssertionError unless a decoded value is valid under a schema of the document."""
    error = next(_validator(name).iter_errors(value), None)
    if error is not None:
        where = "/".join(map(str, error.instance_path))
        raise AssertionError(f"{name}: {where}: {error.message[:1000]}\n{json.dumps(value)[:2000]}")


@functools.cache
def _validator(name: str) -> Any:
    root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas()}}
    return jsonschema_rs.Draft202012Validator(root)


@functools.cache
def _schemas() -> Schemas:
    schemas: Schemas = json.loads(DOCUMENT.read_text())["components"]["schemas"]
    for amend in AMENDMENTS:
        amend(schemas)
    return schemas


@functools.cache
def _event_schemas() -> dict[str, str]:
    """The schema's name of each type of event."""
    schemas = _schemas()
    refs = [branch["$ref"] for branch in schemas["ResponseStreamEvent"]["anyOf"]]
    names = [ref.rsplit("/", 1)[1] for ref in refs]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _open_ends_of_text_streams(schemas: Schemas) -> None:
    """The document gives a text stream's chunks the type of the whole answer; they have no finish
    reason before the end and, as the prose of include_usage says, null for usage."""
    made = json.loads(json.dumps(schemas["CreateCompletionResponse"]))
    choice = made["properties"]["choices"]["items"]["properties"]
    choice["finish_reason"] = _or_null(choice["finish_reason"])
    made["properties"]["usage"] = _or_null(made["properties"]["usage"])
    schemas["CreateCompletionStreamResponse"] = made


def _first_token_of_an_echo(schemas: Schemas) -> None:
    """Nothing comes before it, so OpenAI gives it null in place of a log-probability."""
    choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]
    logprobs = choice["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"] = _or_null(logprobs[name]["items"])


def _embeddings_in_base64(schemas: Schemas) -> None:
    """What encoding_format asks for."""
    properties = schemas["Embedding"]["properties"]
    properties["embedding"] = {"anyOf": [properties["embedding"], {"type": "string"}]}


AMENDMENTS = (_first_token_of_an_echo, _open_ends_of_text_streams, _embeddings_in_base64)


class Findings:
    """What was wrong with answers since the last ``take``."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self.num_checked = 0

    def check(self, method: str, path: str, status: int, content_type: str, body: bytes) -> None:
        self.num_checked += 1
        try:
            check_answer(method, path, status, content_type, body)
        except (AssertionError, ValueError, KeyError) as error:
            self._found.append(f"{method} {path} {status}: {error!r}")

    def take(self) -> list[str]:
        found, self._found = self._found, []
        return found


FINDINGS = Findings()


class _KeptWriter:
    """A body writer that keeps what is written."""

    def __init__(self, writer: BodyWriter, parts: list[bytes]) -> None:
        self._writer, self._parts = writer, parts

    @property
    def is_open(self) -> bool:
        return self._writer.is_open

    def write(self, piece: bytes) -> None:
        self._parts.append(piece)
        self._writer.write(piece)


class CheckedApp:
    """An ASGI application whose answers are checked as they were sent."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        parts: list[bytes] = []
        ended = False
        writer = body_writer(scope)
        if writer is not None:
            scope["extensions"] = {BODY_WRITER: _KeptWriter(writer, parts)}

        async def keep_and_send(message: dict[str, Any]) -> None:
            nonlocal start, ended
            if message["type"] == "http.response.start":
                start = message
            else:
                parts.append(message.get("body", b""))
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, keep_and_send)
        finally:
            kind = dict(start.get("headers", ())).get(b"content-type", b"").decode()
            if ended or kind.startswith("text/event-stream"):
                body = b"".join(parts)
                FINDINGS.check(scope["method"], scope["path"], start["status"], kind, body)


class _KeptStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, request: httpx.Request) -> None:
        self._stream: Any = response.stream
        self._response, self._request = response, request
        self._parts: list[bytes] = []
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._parts.append(part)
            yield part
        self._ended = True

    async def __aiter__(self) -> Any:
        async for part in self._stream:
            self._parts.append(part)
            yield part
        self._ended = True

    def close(self) -> None:
        self._stream.close()
        self._check()

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._check()

    def _check(self) -> None:
        kind = self._response.headers.get("content-type", "")
        if self._ended or kind.startswith("text/event-stream"):
            method, path = self._request.method, self._request.url.path
            body = b"".join(self._parts)
            FINDINGS.check(method, path, self._response.status_code, kind, body)


@contextmanager
def checked_httpx() -> Iterator[None]:
    """Have every answer that httpx brings meanwhile checked: for servers in other processes."""
    whole = httpx.HTTPTransport.handle_request
    whole_async = httpx.AsyncHTTPTransport.handle_async_request

    def handle(self: Any, request: httpx.Request) -> httpx.Response:
        response = whole(self, request)
        response.stream = _KeptStream(response, request)
        return response

    async def handle_async(self: Any, request: httpx.Request) -> httpx.Response:
        response = await whole_async(self, request)
        response.stream = _KeptStream(response, request)
        return response

    httpx.HTTPTransport.handle_request = handle  # type: ignore[method-assign]
    httpx.AsyncHTTPTransport.handle_async_request = handle_async  # type: ignore[method-assign]
    try:
        yield
    finally:
        httpx.HTTPTransport.handle_request = whole  # type: ignore[method-assign]
        httpx.AsyncHTTPTransport.handle_async_request = whole_async  # type: ignore[method-assign]
