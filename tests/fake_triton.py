"""A Triton server that speaks the real gRPC protocol, run by a script instead of a model.

As the real one (2.51): each ModelStreamInfer request of a decoupled model is answered by any number
of responses, each with the parameter ``triton_final_response``; a flag-only final response is sent
only to those who set ``triton_enable_empty_final_response``; errors come as ``error_message`` with
neither code nor status; after the client's half-close the call ends when all was answered.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
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
from fake_pieces import Request, Script, echo_script, join_choices
from fake_wire import Reply, decode_inputs, parameter_value, piece_outputs, string_tensor
from tritonclient.grpc import service_pb2, service_pb2_grpc

from shoal.backend.channel_messages import ChannelOrders, Submission

MODEL = "fake"
THREAD_NAME = "fake triton"
UNHEALTHY = "Stub process '{}_0_0' is not healthy."


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
        reply = Reply(message, send)
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
        for submission, waited_s in zip(read_submissions(orders), orders.waited_s, strict=True):
            channel.waited_s[submission.ref] = waited_s
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
            pieces = iter([join_choices(list(pieces))])
        counts = (_count_tokens(inputs), model.num_cached_tokens)
        for piece in pieces:
            if self._sleep(model, piece.delay_s, request.cancelled):
                return
            if piece.triton_error is not None:
                channel.carrier.fail(piece.triton_error)
                return
            channel.send(piece_deltas(submission.ref, piece, submission.return_logprobs, *counts))
        request.finished.set()

    def _find(self, message: Any, reply: "Reply") -> "FakeModel | None":
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
        reply = Reply(message, send)
        model = self._find(message, reply)
        if model is not None:
            self._serve(model, message, reply, cancelled)

    def _serve(
        self, model: FakeModel, message: Any, reply: "Reply", cancelled: threading.Event
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
            reply.send([string_tensor(name, answer)], True)
            return
        if control:
            self._beat(model, control, reply, cancelled)
            return
        parameters = {name: parameter_value(value) for name, value in message.parameters.items()}
        request = Request(inputs, message.id, parameters, message.model_version)
        model.requests.append(request)
        num_input_tokens = _count_tokens(inputs)
        pieces = model.script(request)
        if not inputs.get("stream"):
            pieces = iter([join_choices(list(pieces))])
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
            outputs = piece_outputs(piece, inputs, num_input_tokens, model.num_cached_tokens)
            reply.send(outputs, final and not model.separate_final)
        if model.separate_final:
            reply.send_empty_final()
        request.finished.set()

    def _beat(
        self, model: FakeModel, control: dict[str, Any], reply: "Reply", cancelled: threading.Event
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
            reply.send([string_tensor("control_output", json.dumps(payload))], index == count - 1)
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


def _count_tokens(inputs: dict[str, Any]) -> int:
    if "input_ids" in inputs:
        return len(inputs["input_ids"])
    return len((inputs.get("text_input") or inputs.get("messages", "")).split())
