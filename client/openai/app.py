"""The OpenAI shim as a FastAPI application: HTTP to one cancellable gRPC stream and back."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from shoal.client.errors import ShoalError, model_not_found
from shoal.client.openai import wire
from shoal.client.openai.access import (
    FORWARDED_HEADERS,
    TIER_HEADER,
    Access,
    AccessMiddleware,
    request_parameters,
)
from shoal.client.openai.answers import (
    CALLERS_NAMES,
    GenerationResponse,
    error_response,
    named_for_caller,
)
from shoal.client.openai.api_keys import KeyFile
from shoal.client.openai.door import Door
from shoal.client.openai.embeddings import CALLERS_NAMES as EMBEDDINGS_NAMES
from shoal.client.openai.embeddings import EmbeddingsBody, EmbeddingsWire
from shoal.client.openai.generation import Generation, GenerationRequest, Task
from shoal.client.openai.json_body import ClientGoneError, read_json
from shoal.client.openai.middleware import DoorMiddleware, RequestMiddleware, RequestTracker
from shoal.client.openai.openapi import describe
from shoal.client.openai.prompts import Prompt, read_messages, read_prompts
from shoal.client.openai.request_models import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    RequestBody,
    parse_body,
)
from shoal.client.openai.responses import Responses
from shoal.client.openai.served_models import ServedModel, ServedModels
from shoal.client.openai.settings import ShimSettings
from shoal.client.openai.text_endpoints import (
    DetokenizeBody,
    TokenizeBody,
    detokenize,
    tokenize,
)
from shoal.client.openai.wire import AnswerWire
from shoal.client.triton_stream import TritonStream

TEXT_NAMES = {"text_input": "prompt", "input_ids": "tokens"}


class Shim:
    """The endpoints. Connects when the application starts, in its event loop."""

    def __init__(self, settings: ShimSettings) -> None:
        self.settings = settings
        self.tracker = RequestTracker()
        self.access = Access(1 / settings.num_workers)
        keys_file = settings.keys_file
        self._keys = None if keys_file is None else KeyFile(keys_file, self.access.replace)
        self.responses = Responses(settings, self.read_json, self.generate)
        self.triton: TritonStream
        self.served: ServedModels

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        async with TritonStream(
            self.settings.triton_grpc, self.settings.control_key
        ) as self.triton:
            self.served = ServedModels(self.triton, self.settings)
            self.served.start()
            async with self._following_keys():
                try:
                    yield
                finally:
                    await self.served.stop()

    @contextlib.asynccontextmanager
    async def _following_keys(self) -> AsyncIterator[None]:
        if self._keys is None:
            yield
            return
        task = asyncio.create_task(self._keys.follow(self.settings.keys_interval_s))
        try:
            yield
        finally:
            task.cancel()

    async def chat_completions(self, request: Request) -> Response:
        body = parse_body(ChatBody, await self.read_json(request))
        prompts = [read_messages(body.messages)]
        return await self._complete(request, body, prompts, wire.chat_wire)

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await self.read_json(request))
        prompts = read_prompts(body.prompt, self.settings.max_prompts)
        if len(prompts) * (body.n or 1) > self.settings.max_choices:
            most = self.settings.max_choices // len(prompts)
            raise ShoalError(f"n must be at most {most} for so many prompts.", 400, None, "n")
        return await self._complete(request, body, prompts, wire.completion_wire)

    async def embeddings(self, request: Request) -> Response:
        body = parse_body(EmbeddingsBody, await self.read_json(request))
        task = body.task(self.settings.max_embedding_inputs)
        return await self.generate(request, task, EmbeddingsWire(body), EMBEDDINGS_NAMES)

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, await self.read_json(request))
        return await self._answer_text(body, lambda model: tokenize(self.triton, model, body))

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, await self.read_json(request))
        return await self._answer_text(body, lambda model: detokenize(self.triton, model, body))

    async def _answer_text(
        self, body: RequestBody, ask: Callable[[ServedModel], Awaitable[dict[str, Any]]]
    ) -> Response:
        model = await self._accepting_model(body.model)
        try:
            return JSONResponse(await ask(model))
        except ShoalError as error:
            raise named_for_caller(error, TEXT_NAMES) from None

    async def list_models(self) -> Response:
        with contextlib.suppress(ShoalError):
            await self.served.refresh(max_age_s=self.settings.discovery_interval_s)
        models = [model_entry(model) for model in self.served.listed()]
        return JSONResponse({"object": "list", "data": models})

    async def get_model(self, model_id: str) -> Response:
        model = await self.served.find(model_id)
        if not model.listed:
            raise model_not_found(model_id)
        return JSONResponse(model_entry(model))

    async def live(self) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self) -> Response:
        states = {model.id: model.state for model in self.served.models}
        ready = [model.id for model in self.served.models if model.is_ready]
        if ready and not self.tracker.draining:
            return JSONResponse({"status": "ready", "ready": ready, "models": states})
        status = "draining" if self.tracker.draining else "not_ready"
        body = {"status": status, "ready": [], "models": states}
        return JSONResponse(body, 503, {"retry-after": "1"})

    async def health(self) -> Response:
        """What the models say of themselves, for people; readiness is ``ready``'s."""
        models = {}
        for model in self.served.models:
            beat = model.monitor.last
            details = {} if beat is None else dataclasses.asdict(beat)
            models[model.id] = details | {
                "state": model.state,
                "ready": model.is_ready,
            }
        return JSONResponse(
            {"draining": self.tracker.draining, "process": os.getpid(), "models": models}
        )

    async def version(self) -> Response:
        return JSONResponse({"version": package_version()})

    def doors(self) -> list[Door]:
        """Of all models that are listed."""
        return [model.door for model in self.served.models if model.listed]

    async def read_json(self, request: Request) -> Any:
        limits = self.settings
        return await read_json(
            request, limits.max_body_bytes, limits.max_json_depth, limits.body_timeout_s
        )

    async def _accepting_model(self, model_id: str) -> ServedModel:
        model = await self.served.find(model_id)
        await model.check_accepting(self.settings.first_beat_timeout_s)
        return model

    async def _complete(
        self, request: Request, body: GenerationBody, prompts: list[Prompt], make_wire: Any
    ) -> Response:
        answer_wire = make_wire(body.model, body.include_usage, body.continuous_usage)
        task = Task(body.model, prompts, body.sampling(), body.streams, body.echoes)
        return await self.generate(request, task, answer_wire)

    async def generate(
        self,
        request: Request,
        task: Task,
        answer_wire: AnswerWire,
        names: Mapping[str, str] = CALLERS_NAMES,
    ) -> Response:
        """The answer to a checked request. ``names``: see GenerationResponse. Raises ShoalError."""
        model = await self._accepting_model(task.model_id)
        parameters = request_parameters(request)
        model.door.enter(str(parameters.get(TIER_HEADER, "")))
        generation = GenerationRequest(
            model,
            task.prompts,
            task.sampling,
            task.stream,
            request.state.request_id,
            parameters,
            task.echo,
        )
        account = request.state.account
        lease = account and account.reserve_tokens(generation.estimated_tokens)
        return GenerationResponse(
            lambda: Generation(generation),
            answer_wire,
            task.stream,
            self.settings.send_timeout_s,
            lease,
            names,
        )


def create_app(settings: ShimSettings | None = None) -> FastAPI:
    """The application; ``app.state.shim`` is the object behind it."""
    shim = Shim(settings or ShimSettings())
    app = FastAPI(
        title="Shoal",
        version=package_version(),
        lifespan=shim.lifespan,
        # The interactive pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        # A redirect would send the client to whatever its Host header said.
        redirect_slashes=False,
    )
    app.state.shim = shim
    app.add_api_route("/v1/chat/completions", shim.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", shim.completions, methods=["POST"])
    app.add_api_route("/v1/embeddings", shim.embeddings, methods=["POST"])
    app.add_api_route("/v1/responses", shim.responses.create, methods=["POST"])
    _add_get(app, "/v1/responses/{response_id}", shim.responses.get)
    app.add_api_route("/v1/responses/{response_id}", shim.responses.delete, methods=["DELETE"])
    app.add_api_route("/tokenize", shim.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", shim.detokenize, methods=["POST"])
    _add_get(app, "/v1/models", shim.list_models)
    _add_get(app, "/v1/models/{model_id:path}", shim.get_model)
    _add_get(app, "/health", shim.health)
    _add_get(app, "/health/live", shim.live)
    _add_get(app, "/health/ready", shim.ready)
    _add_get(app, "/version", shim.version)
    app.add_exception_handler(ShoalError, answer_shoal_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(ClientGoneError, answer_nobody)
    # The one added last is asked first.
    app.add_middleware(DoorMiddleware, doors=shim.doors)
    app.add_middleware(AccessMiddleware, access=shim.access)
    app.add_middleware(RequestMiddleware, tracker=shim.tracker)
    if shim.settings.cors_origins:
        _allow_origins(app, shim.settings.cors_origins)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def _allow_origins(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Let pages of these origins call. Keys travel in a header, so no cookies are allowed."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["authorization", "content-type", "x-request-id", *FORWARDED_HEADERS],
        expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        max_age=600,
    )


def _add_get(app: FastAPI, path: str, endpoint: Callable[..., Awaitable[Response]]) -> None:
    """GET, and HEAD, of which the HTTP server leaves out the body."""
    app.add_api_route(path, endpoint, methods=["GET"])
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def model_entry(model: ServedModel) -> dict[str, Any]:
    beat = model.monitor.last
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "shoal",
        "max_model_len": (beat and beat.max_model_len) or None,
        "ready": model.is_ready,
    }


def package_version() -> str:
    try:
        return version("shoal-llm")
    except PackageNotFoundError:
        return "unknown"


async def answer_shoal_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    return error_response(error)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:256]}"
    if error.status_code == 405:
        allowed = ", ".join(allowed_methods(request))
        text = f"Method not allowed: {what}. Allowed: {allowed}."
        response = error_response(ShoalError(text, 405, "method_not_allowed"))
        response.headers["allow"] = allowed
        return response
    text, code = str(error.detail), None
    if error.status_code == 404:
        text, code = f"Unknown path: {what}.", "not_found"
    response = error_response(ShoalError(text, error.status_code, code))
    response.headers.update(error.headers or {})
    return response


def allowed_methods(request: Request) -> list[str]:
    """Of every route of the request's path; the router itself names those of the first only."""
    methods: set[str] = set()
    for route in request.app.router.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)


async def answer_nobody(_: Request, error: Exception) -> Response:
    return Response(status_code=499)
