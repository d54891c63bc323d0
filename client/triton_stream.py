"""The asynchronous core of shim and SDK: one connection to a server, and what is asked over it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import InferInput, service_pb2_grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from shoal.client import errors, tensors
from shoal.client.channel import ModelChannel
from shoal.client.errors import ShoalError
from shoal.client.generation_stream import GenerationStream
from shoal.client.types import Heartbeat, ModelInfo

RETURNS = ("finish_reason", "num_input_tokens", "num_output_tokens", "cached_tokens", "error")

# gRPC's own back-off grows to two minutes, in which a restarted server would look dead.
CHANNEL_ARGS = [
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]


RESTRICTED = "protocol is restricted"


def control_headers(control_key: str | None) -> dict[str, str] | None:
    """gRPC metadata for the calls that ``shoal serve`` closes to all but the holder of its key."""
    if control_key is None:
        return None
    # tritonserver itself puts the prefix before the name that it was given.
    return {"triton-grpc-protocol-shoal-control-key": control_key}


class TritonStream:
    """One connection to a Triton server; any number of requests may run over it at once.

    Belongs to the event loop in which it was made.
    """

    def __init__(self, url: str, control_key: str | None = None) -> None:
        self.url = url
        self._control_headers = control_headers(control_key)
        self._client = InferenceServerClient(url, channel_args=CHANNEL_ARGS)
        self._connection: grpc.aio.Channel | None = None  # of channels, once there are any
        self._stub: Any = None

    async def __aenter__(self) -> "TritonStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        await self._client.close()
        if self._connection is not None:
            await self._connection.close()

    def generate(
        self,
        model: str,
        version: str = "",
        *,
        text_input: str | None = None,
        messages: Sequence[Mapping[str, Any]] | str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        stream: bool = True,
        return_token_ids: bool = False,
        return_logprobs: bool = False,
        echo: bool = False,
        request_id: str = "",
        parameters: Mapping[str, str | int | bool] | None = None,
        timeout_s: float | None = None,
    ) -> GenerationStream:
        """Start one request and return its deltas; one delta with everything unless ``stream``.

        Give exactly one of ``text_input``, ``messages`` (a list, or its JSON) and ``input_ids``.
        ``parameters`` are for transport (tenant and the like). Raises ShoalError on wrong types.
        """
        inputs = _prompt_inputs(text_input, messages, input_ids)
        inputs.append(
            tensors.string_input(
                "sampling_parameters", tensors.encode_sampling({**(sampling or {})})
            )
        )
        inputs.append(tensors.bool_input("stream", stream))
        inputs.append(tensors.bool_input("exclude_input_in_output", not echo))
        inputs += [tensors.bool_input(f"return_{name}", True) for name in RETURNS]
        if return_token_ids:
            inputs.append(tensors.bool_input("return_token_ids", True))
        if return_logprobs:
            inputs.append(tensors.bool_input("return_logprobs", True))
        request = {
            "model_name": model,
            "model_version": version,
            "inputs": inputs,
            "request_id": request_id,
            "parameters": dict(parameters) if parameters else None,
        }
        num_choices = tensors.num_choices(sampling)
        return GenerationStream(self._start(request, timeout_s), model, num_choices)

    def channel(self, model: str, version: str = "") -> ModelChannel:
        """For many requests of one process: they share a gRPC stream and its responses."""
        if self._stub is None:
            # tritonclient keeps back which request of a stream an error is about.
            self._connection = grpc.aio.insecure_channel(self.url, options=CHANNEL_ARGS)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._connection)
        return ModelChannel(self._stub.ModelStreamInfer, model, version)

    async def heartbeats(
        self,
        model: str,
        version: str = "",
        *,
        interval_ms: int = 250,
        count: int = 20,
        refused: Mapping[str, int] | None = None,
    ) -> AsyncGenerator[Heartbeat, None]:
        """Ask for ``count`` heartbeats, one each ``interval_ms``. Closing the iterator cancels.
        ``refused``: requests by tier that were refused on this side, for the backend's counters."""
        control: dict[str, Any] = {"op": "heartbeat", "interval_ms": interval_ms, "count": count}
        if refused:
            control["refused"] = dict(refused)
        async with contextlib.aclosing(self._control(model, version, control)) as beats:
            async for beat in beats:
                yield beat

    async def status(self, model: str, version: str = "", timeout_s: float = 5.0) -> Heartbeat:
        """The model's state now. Raises ShoalError when the backend does not answer."""
        try:
            async with asyncio.timeout(timeout_s):
                async with contextlib.aclosing(
                    self._control(model, version, {"op": "status"})
                ) as beats:
                    async for beat in beats:
                        return beat
        except TimeoutError:
            pass
        raise errors.unavailable(f"The model {model[:128]!r} did not answer in {timeout_s:g} s.")

    async def tokenize(
        self,
        model: str,
        version: str = "",
        *,
        text_input: str | None = None,
        messages: Sequence[Mapping[str, Any]] | str | None = None,
        add_special_tokens: bool | None = None,
        return_token_strs: bool = False,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> dict[str, Any]:
        """``tokens``, their ``count``, ``token_strs`` (None unless asked for) and
        ``max_model_len``. ``sampling`` holds what shapes a chat's prompt, such as tools."""
        control = {
            "op": "tokenize",
            "add_special_tokens": add_special_tokens,
            "return_token_strs": return_token_strs,
        }
        inputs = _prompt_inputs(text_input, messages, None)
        if sampling:
            text = tensors.encode_sampling({**sampling})
            inputs.append(tensors.string_input("sampling_parameters", text))
        return await self._ask(model, version, control, inputs, timeout_s)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], version: str = "", timeout_s: float = 30.0
    ) -> str:
        """The text of token ids, special tokens included."""
        inputs = [tensors.token_ids_input(token_ids)]
        answer = await self._ask(model, version, {"op": "detokenize"}, inputs, timeout_s)
        return str(answer["prompt"])

    async def _ask(
        self,
        model: str,
        version: str,
        control: dict[str, Any],
        inputs: list[InferInput],
        timeout_s: float,
    ) -> dict[str, Any]:
        """The one answer to a control request with inputs of its own."""
        inputs = [
            *inputs,
            tensors.string_input("control", json.dumps(control)),
            tensors.bool_input("return_error", True),
        ]
        request = {"model_name": model, "model_version": version, "inputs": inputs}
        call = self._start(request, timeout_s)
        try:
            async for response in _responses(call, model):
                answer = tensors.read_answer(response)
                if answer is not None:
                    return answer
        finally:
            call.cancel()
        raise errors.unavailable(f"The model {model[:128]!r} did not answer.")

    async def models(self, timeout_s: float = 5.0) -> list[ModelInfo]:
        """All models and versions in the server's repository, ready or not.

        Where the repository is closed to us (no control key), those that are loaded.
        """
        with _unary_errors():
            try:
                index = await self._client.get_model_repository_index(
                    headers=self._control_headers, client_timeout=timeout_s
                )
            except InferenceServerException as error:
                if RESTRICTED not in (error.message() or ""):
                    raise
                statistics = await self._client.get_inference_statistics(client_timeout=timeout_s)
                return [
                    ModelInfo(entry.name, entry.version, True, "")
                    for entry in statistics.model_stats
                ]
        return [
            ModelInfo(
                entry.name,
                entry.version,
                ready=entry.state == "READY",
                reason=entry.reason,
                loading=entry.state == "LOADING",
            )
            for entry in index.models
        ]

    async def is_shoal_model(self, model: str, version: str = "", timeout_s: float = 5.0) -> bool:
        """Whether a loaded model is run by the ``shoal`` backend: only that takes ``control``."""
        with _unary_errors(model):
            metadata = await self._client.get_model_metadata(
                model, version, client_timeout=timeout_s
            )
        return any(tensor.name == "control" for tensor in metadata.inputs)

    async def is_live(self, timeout_s: float = 2.0) -> bool:
        """Whether tritonserver answers at all; says nothing about models."""
        try:
            return bool(await self._client.is_server_live(client_timeout=timeout_s))
        except InferenceServerException:
            return False

    async def load_model(self, model: str, timeout_s: float = 600.0) -> None:
        """Load a model of the repository (explicit model control) and wait until it is loaded."""
        with _unary_errors(model):
            await self._client.load_model(
                model, headers=self._control_headers, client_timeout=timeout_s
            )

    async def unload_model(self, model: str, timeout_s: float = 60.0) -> None:
        """Ask for a model to be unloaded; returns at once, running requests may finish first."""
        with _unary_errors(model):
            await self._client.unload_model(
                model, headers=self._control_headers, client_timeout=timeout_s
            )

    async def _control(
        self, model: str, version: str, control: dict[str, Any]
    ) -> AsyncGenerator[Heartbeat, None]:
        inputs = [tensors.string_input("control", json.dumps(control))]
        request = {"model_name": model, "model_version": version, "inputs": inputs}
        call = self._start(request, None)
        try:
            async for response in _responses(call, model):
                beat = tensors.read_heartbeat(response)
                if beat is not None:
                    yield beat
        finally:
            call.cancel()

    def _start(self, request: dict[str, Any], timeout_s: float | None) -> Any:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield request

        return self._client.stream_infer(requests(), stream_timeout=timeout_s)


async def _responses(call: Any, model: str) -> AsyncIterator[Any]:
    """The responses of a stream call. Raises ShoalError when it fails."""
    try:
        async for result, error in call:
            if error is not None:
                raise errors.from_tritonserver(error.message(), model)
            yield result.get_response()
    except grpc.RpcError as error:
        raise errors.from_grpc(error.code().name, error.details()) from None
    except asyncio.CancelledError:
        # gRPC's own cancellation (a closed channel) must not look like that of our task.
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        raise errors.from_grpc("CANCELLED", "the call was cancelled") from None


def _prompt_inputs(
    text_input: str | None,
    messages: Sequence[Mapping[str, Any]] | str | None,
    input_ids: Sequence[int] | None,
) -> list[InferInput]:
    inputs = []
    if text_input is not None:
        inputs.append(tensors.string_input("text_input", text_input))
    if messages is not None:
        text = messages if isinstance(messages, str) else json.dumps(messages, allow_nan=False)
        inputs.append(tensors.string_input("messages", text))
    if input_ids is not None:
        inputs.append(tensors.token_ids_input(input_ids))
    if len(inputs) != 1:
        raise ShoalError("Give exactly one of text_input, messages and input_ids.", 400)
    return inputs


@contextlib.contextmanager
def _unary_errors(model: str = "") -> Iterator[None]:
    """Turn tritonclient's exception of a unary call into ours."""
    try:
        yield
    except InferenceServerException as error:
        code = (error.status() or "").removeprefix("StatusCode.")
        text = error.message() or ""
        if model and (code in ("NOT_FOUND", "INVALID_ARGUMENT", "INTERNAL") or "model" in text):
            raise errors.from_tritonserver(text, model) from None
        raise errors.from_grpc(code, text) from None
