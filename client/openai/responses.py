"""The endpoints of /v1/responses."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from shoal.client.openai.access import TENANT_HEADER, request_parameters
from shoal.client.openai.generation import Task
from shoal.client.openai.prompts import read_messages
from shoal.client.openai.request_models import parse_body
from shoal.client.openai.response_store import ResponseStore
from shoal.client.openai.responses_input import CALLERS_NAMES, ResponsesBody
from shoal.client.openai.responses_wire import ResponsesWire
from shoal.client.openai.settings import ShimSettings
from shoal.client.openai.shared_responses import SharedResponseStore

RESPONSES_FILE = "responses.sqlite"


class Responses:
    """Maps responses to chats. Owns what is stored of them, each for its own tenant only."""

    def __init__(
        self,
        settings: ShimSettings,
        read_json: Callable[[Request], Awaitable[Any]],
        generate: Callable[..., Awaitable[Response]],
    ) -> None:
        self.store = make_store(settings)
        self._read_json = read_json
        self._generate = generate

    async def create(self, request: Request) -> Response:
        body = parse_body(ResponsesBody, await self._read_json(request))
        owner = _owner(request)
        turns = body.messages()
        if body.previous_response_id is not None:
            before = self.store.get(body.previous_response_id, owner, "previous_response_id")
            turns = [*before.messages, *turns]
        head: list[dict[str, Any]] = []
        if body.instructions is not None:
            head = [{"role": "system", "content": body.instructions}]

        def remember(response_id: str, answer: bytes, message: dict[str, Any]) -> None:
            self.store.put(response_id, answer, [*turns, message], owner)

        task = Task(body.model, [read_messages(head + turns)], body.sampling(), bool(body.stream))
        wire = ResponsesWire(body.echo(), body.store is not False, remember)
        return await self._generate(request, task, wire, CALLERS_NAMES)

    async def get(self, request: Request, response_id: str) -> Response:
        found = self.store.get(response_id, _owner(request))
        return Response(found.body, media_type="application/json")

    async def delete(self, request: Request, response_id: str) -> Response:
        self.store.delete(response_id, _owner(request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def make_store(settings: ShimSettings) -> ResponseStore | SharedResponseStore:
    """In memory, or in a file where other processes look too."""
    limits = (settings.max_stored_responses, settings.max_stored_bytes, settings.stored_for_s)
    if settings.shared_dir is None:
        return ResponseStore(*limits)
    return SharedResponseStore(settings.shared_dir / RESPONSES_FILE, *limits)


def _owner(request: Request) -> str:
    return str(request_parameters(request).get(TENANT_HEADER, ""))
