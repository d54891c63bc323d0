"""A stand-in for triton_python_backend_utils that keeps the rules of the real one.

The real one exists only inside the Triton server's stub process. ``install()`` puts this one under
its name; do so before importing ``shoal.backend.codec`` or ``shoal.backend.model``.
"""

import json
import sys
import threading
import time
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_STRING_KINDS = ("O", "S")
_MODULE_NAME = "triton_python_backend_utils"

model_dir = ""


def install() -> Any:
    """Make ``import triton_python_backend_utils`` find this module, and return it."""
    return sys.modules.setdefault(_MODULE_NAME, sys.modules[__name__])


def get_model_dir() -> str:
    return model_dir


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE = range(5)
    UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(5, 8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError("message must be a str")
        if code not in range(8):
            raise TypeError("unknown error code")
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError("Tensor takes a str and a numpy array")
        if array.dtype.kind not in (*_STRING_KINDS, "b", "i", "u", "f"):
            raise TritonModelException(f"unsupported dtype {array.dtype}")
        if array.dtype.kind in _STRING_KINDS:
            # What crosses shared memory are bytes, whatever was put in.
            items = [
                item if isinstance(item, bytes) else str(item).encode()
                for item in array.reshape(-1)
            ]
            filled = np.empty(len(items), dtype=np.object_)
            filled[:] = items
            array = filled.reshape(array.shape)
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class InferenceResponse:
    # The embedded 2.51 has no `parameters` argument.
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        for tensor in output_tensors or []:
            if not isinstance(tensor, Tensor):
                raise TypeError("output_tensors must hold Tensor objects")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError("error must be a TritonError")
        self._tensors = output_tensors or []
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def value(self, name: str) -> Any:
        """For tests: the output as a list, strings decoded; None when it is not there."""
        for tensor in self._tensors:
            if tensor.name() == name:
                items = tensor.as_numpy().reshape(-1).tolist()
                return [item.decode() if isinstance(item, bytes) else item for item in items]
        return None


class ResponseSender:
    """Flags 0 or 1; flag 0 needs a response; nothing may follow flag 1."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.num_sends = 0
        self.closed = False  # the final flag was sent, and nothing is on its way any more
        self._no_more = False
        self.send_delay = 0.0  # what one round trip costs
        self.fail_sends = 0  # that many sends raise
        self._cancelled = False
        self._inside = threading.Lock()
        self._changed = threading.Condition()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if flags == 0 and response is None:
            raise TritonModelException("Inference Response object must be provided")
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError("response must be an InferenceResponse")
        if self._no_more:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        # As in the real one: closed by the flag, whether or not the sending then succeeds.
        self._no_more = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._enter()
        try:
            time.sleep(self.send_delay)
            if self.fail_sends:
                self.fail_sends -= 1
                raise TritonModelException("Failed to send the response.")
            self.num_sends += 1
            if response is not None:
                self.responses.append(response)
        finally:
            self._inside.release()
            with self._changed:
                self.closed = self._no_more
                self._changed.notify_all()

    def is_cancelled(self) -> bool:
        if self._no_more:
            raise AssertionError("the real server would read freed memory here")
        self._enter()
        self._inside.release()
        return self._cancelled

    def cancel(self) -> None:
        """For tests: the client goes away."""
        self._cancelled = True

    def wait_closed(self, timeout_s: float = 10.0) -> list[InferenceResponse]:
        """For tests: all responses, once the final one is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.closed, timeout_s), "no final response"
        return self.responses

    def wait_responses(self, count: int, timeout_s: float = 10.0) -> list[InferenceResponse]:
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.responses) >= count, timeout_s)
        assert done, f"{len(self.responses)} of {count} responses"
        return self.responses

    def _enter(self) -> None:
        if not self._inside.acquire(blocking=False):
            raise AssertionError("two threads inside one response sender")


class InferenceRequest:
    def __init__(
        self,
        inputs: list[Tensor],
        parameters: dict[str, Any] | None = None,
        request_id: str = "",
    ) -> None:
        self._inputs = inputs
        self._parameters = json.dumps(parameters or {})
        self._request_id = request_id
        self.sender = ResponseSender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> ResponseSender:
        return self.sender


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


class Metric:
    def __init__(self, kind: int, labels: dict[str, str]) -> None:
        self.kind = kind
        self.labels = labels
        self._value = 0.0

    def increment(self, value: float) -> None:
        if self.kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter cannot be decremented")
        self._value += value

    def set(self, value: float) -> None:
        raise AssertionError("the real one holds the GIL here, for ever if the server dies")

    def value(self) -> float:
        return self._value


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)
    supported = True
    families: dict[str, "MetricFamily"] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        if not MetricFamily.supported:
            raise TritonModelException("metrics not supported")
        self.name = name
        self.kind = kind
        self.metrics: list[Metric] = []
        MetricFamily.families[name] = self

    def Metric(self, labels: dict[str, str] | None = None) -> Metric:  # noqa: N802
        metric = Metric(self.kind, dict(labels or {}))
        self.metrics.append(metric)
        return metric


class ModelConfig:
    """The part of the configuration that auto_complete_config may fill in."""

    def __init__(self, name: str = "model") -> None:
        self.config: dict[str, Any] = {
            "name": name,
            "max_batch_size": 0,
            "input": [],
            "output": [],
        }

    def as_dict(self) -> dict[str, Any]:
        return self.config

    def set_max_batch_size(self, size: int) -> None:
        if self.config["max_batch_size"] > size:
            raise ValueError("configuration specified a larger max_batch_size")
        self.config["max_batch_size"] = size

    def add_input(self, properties: dict[str, Any]) -> None:
        self._add("input", properties, {"name", "data_type", "dims", "optional"})

    def add_output(self, properties: dict[str, Any]) -> None:
        self._add("output", properties, {"name", "data_type", "dims"})

    def _add(self, kind: str, properties: dict[str, Any], allowed: set[str]) -> None:
        if set(properties) - allowed:
            raise ValueError("unknown property")
        if not {"name", "data_type", "dims"} <= set(properties):
            raise ValueError("missing property")
        if any(item["name"] == properties["name"] for item in self.config[kind]):
            return
        self.config[kind].append(properties)

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        if set(policy) - {"decoupled"}:
            raise ValueError("unknown property")
        self.config["model_transaction_policy"] = dict(policy)
