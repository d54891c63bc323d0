"""The SDK's way over the OpenAI endpoint: plain HTTP, with server-sent events."""

import asyncio
import contextlib
import email.utils
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from shoal.client import errors
from shoal.client.errors import ShoalError
from shoal.client.event_stream import EventReader
from shoal.client.transports import Prompt, check_prompt, is_chat
from shoal.client.types import Delta, ModelInfo

CONNECT_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 10.0  # of what is answered at once
DONE = b"[DONE]"
STATUS_OF_TYPE = {"service_unavailable_error": 503, "rate_limit_error": 429}
MAX_ERROR_BYTES = 64 * 1024


class HttpTransport:
    """See Transport. Texts and token ids go to /v1/completions, messages to the chat."""

    def __init__(self, url: str, api_key: str | None, ca_file: Path | None) -> None:
        """``url`` with or without ``/v1``; ``ca_file``: whom alone to trust."""
        headers = {"user-agent": "shoal-sdk"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            verify=ssl.create_default_context(cafile=ca_file) if ca_file else True,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    def generate(
        self,
        model: str,
        version: str,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        stream: bool,
        timeout_s: float | None,
    ) -> "HttpAnswer":
        check_prompt(prompt)
        chat = is_chat(prompt)
        body = dict(sampling)
        body["model"] = f"{model}@{version}" if version else model
        body["messages" if chat else "prompt"] = prompt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._client.is_closed:
            raise ShoalError("The client is closed.", 400, "client_closed")
        try:
            path = "/v1/chat/completions" if chat else "/v1/completions"
            request = self._client.build_request("POST", path, json=body)
        except (TypeError, ValueError) as error:
            raise ShoalError(f"The request cannot be written as JSON: {error}.", 400) from None
        return HttpAnswer(self._client, request, stream, timeout_s)

    async def models(self) -> list[ModelInfo]:
        """The models that the endpoint serves."""
        found = []
        with _http_errors():
            for entry in (await self._get("/v1/models"))["data"]:
                name, _, version = str(entry["id"]).partition("@")
                found.append(ModelInfo(name, version, bool(entry.get("ready", True))))
        return found

    async def is_ready(self, model: str) -> bool:
        with _http_errors():
            models = (await self._get("/health/ready"))["models"]
            return bool(models.get(model) == "ready")

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str) -> dict[str, Any]:
        reply = await self._client.get(path, timeout=REPLY_TIMEOUT_S)
        if reply.status_code != 200:
            raise error_of(reply)
        values: dict[str, Any] = reply.json()
        return values


class HttpAnswer:
    """One request. Sent by the first step of iteration; closing it closes the connection, by which
    the server ends the work at once."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        request: httpx.Request,
        streams: bool,
        timeout_s: float | None,
    ) -> None:
        self._client = client
        self._request = request
        self._streams = streams
        self._timeout_s = timeout_s
        self._reply: httpx.Response | None = None
        self._deltas = self._run()

    async def __anext__(self) -> Delta:
        return await self._deltas.__anext__()

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        with contextlib.suppress(RuntimeError):  # a step of it runs in another task
            await self._deltas.aclose()
        if self._reply is not None:
            await self._reply.aclose()

    async def _run(self) -> AsyncGenerator[Delta, None]:
        deadline = None
        if self._timeout_s is not None:
            deadline = asyncio.get_running_loop().time() + self._timeout_s
        with _http_errors():
            async with asyncio.timeout_at(deadline):
                self._reply = await self._client.send(self._request, stream=True)
            try:
                async with asyncio.timeout_at(deadline):
                    if self._reply.status_code != 200 or not self._streams:
                        await self._reply.aread()
                if self._reply.status_code != 200:
                    raise error_of(self._reply)
                if not self._streams:
                    for delta in _whole_deltas(self._reply.json()):
                        yield delta
                    return
                events = _events(self._reply)
                held = _Held()
                while True:
                    async with asyncio.timeout_at(deadline):
                        data = await anext(events, None)
                    if data is None:
                        raise errors.unavailable(
                            "The server ended the answer before it was finished."
                        )
                    if data == DONE:
                        return
                    for delta in held.read(json.loads(data)):
                        yield delta
            finally:
                await self._reply.aclose()


class _Held:
    """Turns chunks into deltas. The end of the first choice is held back until the usage comes,
    so that the last delta tells it, as over gRPC."""

    def __init__(self) -> None:
        self._end: Delta | None = None

    def read(self, chunk: dict[str, Any]) -> Iterator[Delta]:
        if chunk.get("error"):
            raise _error_from(chunk["error"], None)
        for choice in chunk["choices"]:
            delta = _choice_delta(choice, choice.get("delta") or {})
            if delta.finish_reason is not None and delta.index == 0:
                self._end = delta
            elif delta != Delta(index=delta.index):
                yield delta
        if usage := chunk.get("usage"):
            yield _with_usage(self._end or Delta(), usage)


def _whole_deltas(body: dict[str, Any]) -> Iterator[Delta]:
    for choice in body["choices"]:
        delta = _choice_delta(choice, choice.get("message") or {})
        yield _with_usage(delta, body["usage"]) if delta.index == 0 else delta


def _choice_delta(choice: dict[str, Any], part: dict[str, Any]) -> Delta:
    """``part``: the delta or message of a chat; a completion has its text beside."""
    calls = part.get("tool_calls")
    return Delta(
        text=choice.get("text") or part.get("content") or "",
        reasoning=part.get("reasoning_content") or "",
        tool_calls=json.dumps([_call(i, call) for i, call in enumerate(calls)]) if calls else None,
        finish_reason=choice.get("finish_reason"),
        index=choice["index"],
    )


def _call(position: int, call: dict[str, Any]) -> dict[str, Any]:
    """A call or a part of one, as the backend writes it."""
    function = call.get("function") or {}
    return {
        "index": call.get("index", position),
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments") or "",
    }


def _with_usage(delta: Delta, usage: dict[str, Any]) -> Delta:
    return replace(
        delta,
        num_input_tokens=usage["prompt_tokens"],
        num_output_tokens=usage["completion_tokens"],
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


async def _events(reply: httpx.Response) -> AsyncIterator[bytes]:
    reader = EventReader()
    waiting: deque[bytes] = deque()
    async for piece in reply.aiter_bytes():
        waiting += reader.feed(piece)
        while waiting:
            yield waiting.popleft()


def error_of(reply: httpx.Response) -> ShoalError:
    """What an answer with an error status says, whoever wrote it."""
    wait_ms = retry_after_ms(reply.headers)
    try:
        values = json.loads(reply.content[:MAX_ERROR_BYTES])["error"]
        return _error_from(values, wait_ms, reply.status_code)
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"The server answered {reply.status_code} {reply.reason_phrase}."
        return ShoalError(text, reply.status_code, None, retry_after_ms=wait_ms)


def retry_after_ms(headers: Mapping[str, str]) -> int | None:
    """The wait that an answer asks for, in any of its forms."""
    with contextlib.suppress(KeyError, ValueError):
        return max(int(float(headers["retry-after-ms"])), 0)
    told = headers.get("retry-after", "")
    with contextlib.suppress(ValueError, OverflowError):
        return max(int(float(told) * 1000), 0)
    with contextlib.suppress(ValueError, TypeError):
        at = email.utils.parsedate_to_datetime(told).timestamp()
        return max(int((at - time.time()) * 1000), 0)
    return None


def _error_from(values: dict[str, Any], wait_ms: int | None, status: int = 0) -> ShoalError:
    kind = str(values.get("type") or "")
    return ShoalError(
        str(values["message"]),
        status or STATUS_OF_TYPE.get(kind, 500),
        values.get("code"),
        values.get("param"),
        kind,
        wait_ms,
    )


@contextlib.contextmanager
def _http_errors() -> Iterator[None]:
    try:
        yield
    except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as error:
        text = "The request took longer than its timeout."
        raise ShoalError(text, 504, "timeout", detail=str(error)) from None
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise errors.unavailable("The server cannot be reached.", detail=str(error)) from None
    except httpx.InvalidURL as error:
        raise ShoalError(f"url is not valid: {error}.", 400, param="url") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        text = "The server answered in another form than the OpenAI API's."
        raise ShoalError(text, 502, "bad_gateway", detail=str(error)) from None
