"""A Triton server that speaks the real gRPC protocol, run by a script instead of a model.

As the real one (2.51): each ModelStreamInfer request of a decoupled model is answered by any number
of responses, each with the parameter ``triton_final_response``; a flag-only final response is sent
only to those who set ``triton_enable_empty_final_response``; errors come as ``error_message`` with
neither code nor status; after the client's half-close the call ends when all was answered.
"""

import contextlib
import json
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from fake_channel import (
    FakeChannel,
    inputs_of,
    piece_deltas,
    read_orders,
    read_submissions,
    send_news,
)
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shoal.backend.channel_messages import ChannelOrders, Submission

MODEL = "fake"
STRING_INPUTS = ("text_input", "messages", "sampling_parameters", "control")
RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens")
RETURNS += ("num_output_tokens", "cached_tokens", "token_ids", "error")
BOOL_INPUTS = ("stream", "exclude_input_in_output", *(f"return_{name}" for name in RETURNS))
THREAD_NAME = "fake triton"
UNHEALTHY = "Stub process '{}_0_0' is not healthy."


@dataclass(frozen=True, slots=True)
class Piece:
    """One response of the fake backend; ``output`` holds extra tensors by name."""

    text: str = ""
    num_tokens: int = 1
    finish_reason: str | None = None
    delay_s: float = 0.0
    error: dict[str, Any] | None = None  # as the `error` tensor
    triton_error: str | None = None  # as tritonserver's own error message
    logprobs: tuple[dict[str, Any], ...] = ()  # one entry a token, as the backend writes them
    prompt_logprobs: tuple[dict[str, Any], ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()  # deltas
    reasoning: str = ""
    embedding: tuple[float, ...] = ()
    index: int | None = None  # of a request for several choices
    beside: tuple["Piece", ...] = ()  # of further choices, in the same response
    is_last: bool = True  # with a finish reason: the request ends


@dataclass
class Request:
    """One decoded inference request, as the fake backend saw it."""

    inputs: dict[str, Any]
    id: str
    parameters: dict[str, Any]
    version: str = ""  # empty: the server's choice
    cancelled: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def sampling(self) -> dict[str, Any]:
        return json.loads(self.inputs.get("sampling_parameters", "{}"))


Script = Callable[[Request], Iterator[Piece]]


def echo_script(request: Request) -> Iterator[Piece]:
    """As many numbered words as max_tokens says (4 unless given)."""
    sampling = request.sampling
    count = sampling.get("max_completion_tokens", sampling.get("max_tokens", 4))
    num_choices = sampling.get("n", 1)
    if num_choices > 1:
        yield from _echo_choices(count, num_choices)
        return
    for index in range(count):
        yield Piece(f"w{index} ", finish_reason="length" if index == count - 1 else None)


def _echo_choices(count: int, num_choices: int) -> Iterator[Piece]:
    """Choice i says i words more than the first; what is said at once comes in one response."""
    for step in range(count + num_choices - 1):
        pieces = [
            Piece(
                f"c{index}w{step} ",
                finish_reason="length" if step == count + index - 1 else None,
                index=index,
                is_last=index == num_choices - 1,
            )
            for index in range(num_choices)
            if step < count + index
        ]
        yield replace(pieces[0], beside=tuple(pieces[1:]))


@dataclass
class FakeModel:
    """State of one model: what it answers and how its heart beats."""

    script: Script = echo_script
    state: str = "ready"
    loaded: bool = True
    loading: bool = False
    beating: bool = True
    queue: dict[str, Any] | None = None  # as its beats tell of it
    stub_alive: bool = True  # a dead stub leaves running requests hanging and refuses new ones
    separate_final: bool = False  # the final flag comes alone, after the last response
    is_shoal: bool = True
    versions: tuple[str, ...] = ("1",)
    num_cached_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    num_control: int = 0
    channels: dict[str, FakeChannel] = field(default_factory=dict)
    num_orders: int = 0  # messages to channels

    @property
    def repository_state(self) -> str:
        if self.loading:
            return "LOADING"
        return "READY" if self.loaded else "UNAVAILABLE"


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The server. ``models`` may be changed while it runs."""

    def __init__(self, **models: FakeModel) -> None:
        self.models: dict[str, FakeModel] = models or {MODEL: FakeModel()}
        self.port = 0
        self._server: grpc.Server | None = None
        self._stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def model(self) -> FakeModel:
        return self.models[MODEL]

    def __enter__(self) -> "FakeTriton":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start, on the port of the last time when there was one."""
        self._stopping.clear()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(96), options=[("grpc.so_reuseport", 0)]
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Stop; open calls are cut off."""
        self._stopping.set()
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def ServerLive(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        entry = service_pb2.RepositoryIndexResponse.ModelIndex
        index = [
            entry(name=name, version=version, state=model.repository_state)
            for name, model in self.models.items()
            for version in model.versions
        ]
        return service_pb2.RepositoryIndexResponse(models=index)

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        model = self.models.get(request.name)
        if model is None:
            text = f"Request for unknown model: '{request.name}' is not found"
            context.abort(grpc.StatusCode.NOT_FOUND, text)
        assert model is not None
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        names = ["text_input", *(["control"] if model.is_shoal else [])]
        inputs = [tensor(name=name, datatype="BYTES", shape=[1]) for name in names]
        return service_pb2.ModelMetadataResponse(name=request.name, versions=["1"], inputs=inputs)

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        model = self.models[request.model_name]
        if not model.loaded:  # loading a loaded model does nothing, even with a dead stub
            model.loaded = model.stub_alive = True
        return service_pb2.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        self.models[request.model_name].loaded = False
        return service_pb2.RepositoryModelUnloadResponse()

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        replies: queue.Queue[Any] = queue.Queue()
        cancelled = threading.Event()
        own_channels: list[FakeChannel] = []

        def cancel() -> None:
            cancelled.set()
            for channel in own_channels:
                for event in list(channel.cancelled.values()):
                    event.set()

        context.add_callback(cancel)
        workers: list[threading.Thread] = []

        def begin(target: Callable[..., None], *arguments: Any) -> None:
            worker = threading.Thread(
                target=target, args=arguments, daemon=True, name=f"{THREAD_NAME}'s answer"
            )
            workers.append(worker)
            worker.start()

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):  # the client has gone
                for message in request_iterator:
                    orders = read_orders(message)
                    if orders is None:
                        begin(self._answer, message, replies.put, cancelled)
                    else:
                        self._take(orders, message, replies.put, own_channels)
            for worker in workers:
                worker.join()
            replies.put(None)

        threading.Thread(target=read, daemon=True, name=f"{THREAD_NAME}'s reader").start()
        while (reply := replies.get()) is not None:
            yield reply

    def _take(
        self,
        orders: ChannelOrders,
        message: Any,
        send: Callable[[Any], None],
        own_channels: list[FakeChannel],
    ) -> None:
        """Carry out orders, in the order in which they come. A message that does not open the
        channel ends at once."""
        reply = _Reply(message, send)
        model = self._find(message, reply)
        if model is None:
            return
        model.num_orders += 1
        if orders.opens:
            channel = model.channels[orders.channel] = FakeChannel(reply)
            own_channels.append(channel)
        elif orders.channel not in model.channels:
            send_news(reply, [], True, is_unknown=True)
            return
        channel = model.channels[orders.channel]
        channel.num_read = max(channel.num_read, orders.num_read)
        for ref in orders.cancellations:
            if ref in channel.cancelled:
                channel.cancelled[ref].set()
        for submission in read_submissions(orders):
            channel.cancelled[submission.ref] = threading.Event()
            served = (model, channel, submission, message.model_version)
            threading.Thread(target=self._serve_in, args=served, daemon=True).start()
        if not orders.opens:
            reply.send([], True)

    def _serve_in(
        self, model: FakeModel, channel: FakeChannel, submission: Submission, version: str
    ) -> None:
        """One request of a channel."""
        inputs = inputs_of(submission)
        request = Request(
            inputs, submission.request_id, dict(submission.parameters), version,
            channel.cancelled[submission.ref],
        )  # fmt: skip
        model.requests.append(request)
        pieces = model.script(request)
        if not submission.stream:
            pieces = iter([_join_choices(list(pieces))])
        counts = (_count_tokens(inputs), model.num_cached_tokens)
        for piece in pieces:
            if self._sleep(model, piece.delay_s, request.cancelled):
                return
            if piece.triton_error is not None:
                channel.carrier.fail(piece.triton_error)
                return
            channel.send(piece_deltas(submission.ref, piece, submission.return_logprobs, *counts))
        request.finished.set()

    def _find(self, message: Any, reply: "_Reply") -> "FakeModel | None":
        """The model that takes a message, or its refusal."""
        model = self.models.get(message.model_name)
        if model is None:
            reply.fail(f"Request for unknown model: '{message.model_name}' is not found")
        elif not model.loaded:
            reply.fail(
                f"Request for unknown model: '{message.model_name}' has no available versions"
            )
        elif not model.stub_alive:
            reply.fail(UNHEALTHY.format(message.model_name))
        else:
            return model
        return None

    def _answer(
        self, message: Any, send: Callable[[Any], None], cancelled: threading.Event
    ) -> None:
        reply = _Reply(message, send)
        model = self._find(message, reply)
        if model is not None:
            self._serve(model, message, reply, cancelled)

    def _serve(
        self, model: FakeModel, message: Any, reply: "_Reply", cancelled: threading.Event
    ) -> None:
        try:
            inputs = decode_inputs(message)
        except ValueError as error:
            reply.fail(str(error))
            return
        control = json.loads(inputs.get("control", "{}"))
        if control.get("op") in ("tokenize", "detokenize"):
            answer = json.dumps(_text_answer(control, inputs))
            name = "error" if "error" in answer else "control_output"
            reply.send([_string(name, answer)], True)
            return
        if control:
            self._beat(model, control, reply, cancelled)
            return
        parameters = {name: _parameter(value) for name, value in message.parameters.items()}
        request = Request(inputs, message.id, parameters, message.model_version)
        model.requests.append(request)
        num_input_tokens = _count_tokens(inputs)
        pieces = model.script(request)
        if not inputs.get("stream"):
            pieces = iter([_join_choices(list(pieces))])
        for piece in pieces:
            gone = self._sleep(model, piece.delay_s, cancelled)
            if gone:
                request.cancelled.set()
                return
            if piece.triton_error is not None:
                reply.fail(piece.triton_error)
                return
            final = piece.error is not None or any(
                part.finish_reason is not None and part.is_last for part in (piece, *piece.beside)
            )
            outputs = _piece_outputs(piece, inputs, num_input_tokens, model.num_cached_tokens)
            reply.send(outputs, final and not model.separate_final)
        if model.separate_final:
            reply.send_empty_final()
        request.finished.set()

    def _beat(
        self, model: FakeModel, control: dict[str, Any], reply: "_Reply", cancelled: threading.Event
    ) -> None:
        model.num_control += 1
        count = control.get("count", 1) if control["op"] == "heartbeat" else 1
        for index in range(count):
            while not model.beating:
                if self._sleep(model, 0.02, cancelled):
                    return
            payload = {"state": model.state, "model": reply.model, "version": "1", "step": index}
            payload |= {"step_age_ms": 1.5, "free_blocks": 64, "max_model_len": 128, "new": 1}
            payload["self_test"] = {"ok": True, "num_prompts": 4}
            payload["queue"] = model.queue
            reply.send([_string("control_output", json.dumps(payload))], index == count - 1)
            pause = control.get("interval_ms", 250) / 1000 if index < count - 1 else 0
            if self._sleep(model, pause, cancelled):
                return

    def _sleep(self, model: FakeModel, delay_s: float, cancelled: threading.Event) -> bool:
        """Wait; True when the caller has gone. A dead stub waits for ever."""
        end = time.monotonic() + delay_s
        while (time.monotonic() < end or not model.stub_alive) and not self._stopping.is_set():
            if cancelled.wait(min(0.01, max(end - time.monotonic(), 0.001))):
                return True
        return cancelled.is_set() or self._stopping.is_set()


class _Reply:
    """Sends the responses of one request the way tritonserver frames them."""

    def __init__(self, message: Any, send: Callable[[Any], None]) -> None:
        self.model = message.model_name
        self._id = message.id
        self._version = message.model_version or "1"
        self._send = send
        wish = message.parameters.get("triton_enable_empty_final_response")
        self._wants_empty_final = wish is not None and wish.bool_param

    def send(self, outputs: list[tuple[str, str, list[int], bytes]], final: bool) -> None:
        response = service_pb2.ModelInferResponse(
            model_name=self.model, model_version=self._version, id=self._id
        )
        response.parameters["triton_final_response"].bool_param = final
        for name, datatype, shape, raw in outputs:
            response.outputs.add(name=name, datatype=datatype, shape=shape)
            response.raw_output_contents.append(raw)
        self._send(service_pb2.ModelStreamInferResponse(infer_response=response))

    def send_empty_final(self) -> None:
        if self._wants_empty_final:
            self.send([], True)

    def fail(self, text: str) -> None:
        response = service_pb2.ModelInferResponse(id=self._id)
        self._send(
            service_pb2.ModelStreamInferResponse(error_message=text, infer_response=response)
        )


def _text_answer(control: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """A token a word, which stands for the word's length."""
    if control["op"] == "detokenize":
        return {"prompt": " ".join("x" * length for length in inputs["input_ids"])}
    words = (inputs.get("text_input") or inputs.get("messages", "")).split()
    if "refused" in words:
        return {"message": "text_input is an error", "status": 400, "param": "text_input"}
    tokens = [len(word) for word in words]
    strs = words if control["return_token_strs"] else None
    return {"count": len(tokens), "max_model_len": 128, "tokens": tokens, "token_strs": strs}


def decode_inputs(message: Any) -> dict[str, Any]:
    """Inputs by name. Raises ValueError as tritonserver does for those it does not know."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        kinds = {"BYTES": STRING_INPUTS, "BOOL": BOOL_INPUTS, "INT64": ("input_ids",)}
        if tensor.name not in kinds.get(tensor.datatype, ()):
            raise ValueError(
                f"unexpected inference input '{tensor.name}' for model '{message.model_name}'"
            )
        if tensor.datatype == "BYTES":
            assert list(tensor.shape) == [1]
            assert int.from_bytes(raw[:4], "little") == len(raw) - 4
            values[tensor.name] = raw[4:].decode()
        elif tensor.datatype == "BOOL":
            values[tensor.name] = raw == b"\x01"
        else:
            values[tensor.name] = list(struct.unpack(f"<{tensor.shape[0]}q", raw))
    return values


def _piece_outputs(
    piece: Piece, inputs: dict[str, Any], num_input_tokens: int, num_cached_tokens: int
) -> list[tuple[str, str, list[int], bytes]]:
    asked = {name for name in RETURNS if inputs.get(f"return_{name}")}
    parts = (piece, *piece.beside)
    ids = [number for part in parts for number in range(part.num_tokens)]
    outputs = {
        "text_output": _string("text_output", *(part.text for part in parts)),
        "num_input_tokens": _uint32("num_input_tokens", num_input_tokens),
        "num_output_tokens": _uint32("num_output_tokens", *(part.num_tokens for part in parts)),
        "cached_tokens": _uint32("cached_tokens", num_cached_tokens),
        "token_ids": ("token_ids", "INT64", [len(ids)], struct.pack(f"<{len(ids)}q", *ids)),
    }
    if piece.index is not None:
        outputs["index"] = _uint32("index", *(part.index for part in parts))
        asked.add("index")
    if any(part.finish_reason is not None for part in parts):
        reasons = (part.finish_reason or "" for part in parts)
        outputs["finish_reason"] = _string("finish_reason", *reasons)
    if piece.error is not None:
        outputs["finish_reason"] = _string("finish_reason", "error")
        outputs["error"] = _string("error", json.dumps(piece.error))
    if piece.tool_calls:
        outputs["tool_calls"] = _string("tool_calls", json.dumps(piece.tool_calls))
        asked.add("tool_calls")
    if piece.reasoning:
        outputs["reasoning_output"] = _string("reasoning_output", piece.reasoning)
        asked.add("reasoning_output")
    if piece.embedding:
        raw = struct.pack(f"<{len(piece.embedding)}f", *piece.embedding)
        outputs["embedding"] = ("embedding", "FP32", [len(piece.embedding)], raw)
        asked.add("embedding")
    if piece.prompt_logprobs:
        outputs["prompt_logprobs"] = _string("prompt_logprobs", json.dumps(piece.prompt_logprobs))
        asked.add("prompt_logprobs")
    if piece.logprobs:
        outputs["logprobs"] = _string("logprobs", json.dumps(piece.logprobs))
    return [value for name, value in outputs.items() if name == "text_output" or name in asked]


def _join_choices(pieces: list[Piece]) -> Piece:
    parts = [part for piece in pieces for part in (piece, *piece.beside)]
    indices = sorted({part.index for part in parts if part.index is not None})
    if not indices:
        return _join(pieces)
    joined = [
        replace(_join([part for part in parts if part.index == index]), index=index)
        for index in indices
    ]
    return replace(joined[0], beside=tuple(joined[1:]))


def _join(pieces: list[Piece]) -> Piece:
    """What a backend sends to a client that does not stream."""
    for piece in pieces:
        if piece.error or piece.triton_error:
            return piece
    return Piece(
        "".join(piece.text for piece in pieces),
        sum(piece.num_tokens for piece in pieces),
        pieces[-1].finish_reason,
        sum(piece.delay_s for piece in pieces),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        prompt_logprobs=tuple(entry for piece in pieces for entry in piece.prompt_logprobs),
        tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
        embedding=pieces[0].embedding,
        reasoning="".join(piece.reasoning for piece in pieces),
    )


def _string(name: str, *texts: str) -> tuple[str, str, list[int], bytes]:
    data = [text.encode() for text in texts]
    raw = b"".join(len(item).to_bytes(4, "little") + item for item in data)
    return name, "BYTES", [len(texts)], raw


def _uint32(name: str, *values: int) -> tuple[str, str, list[int], bytes]:
    return name, "UINT32", [len(values)], struct.pack(f"<{len(values)}I", *values)


def _count_tokens(inputs: dict[str, Any]) -> int:
    if "input_ids" in inputs:
        return len(inputs["input_ids"])
    return len((inputs.get("text_input") or inputs.get("messages", "")).split())


def _parameter(value: Any) -> Any:
    return getattr(value, value.WhichOneof("parameter_choice"))
