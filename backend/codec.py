"""Between Triton's tensors and our own types; with model.py the only user of pb_utils.

Tensor names are those of NVIDIA's vllm_backend where it has one, so that its clients work here.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from shoal.backend.channel_messages import ChannelOrders
from shoal.backend.chunk import Chunk
from shoal.backend.chunk_json import logprobs_json, tool_calls_json
from shoal.backend.intake import RawRequest
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sequence import FinishReason

_STRING, _BOOL = "TYPE_STRING", "TYPE_BOOL"
_ORDERS = msgspec.msgpack.Decoder(ChannelOrders)

# name -> (data type, dims). All are optional: text_input, messages and input_ids are alternatives,
# and a control request has none of them.
INPUTS: dict[str, tuple[str, list[int]]] = {
    "text_input": (_STRING, [1]),
    "messages": (_STRING, [1]),
    "input_ids": ("TYPE_INT64", [-1]),
    "image": (_STRING, [-1]),
    "stream": (_BOOL, [1]),
    "sampling_parameters": (_STRING, [1]),
    "exclude_input_in_output": (_BOOL, [1]),
    "return_finish_reason": (_BOOL, [1]),
    "return_cumulative_logprob": (_BOOL, [1]),
    "return_logprobs": (_BOOL, [1]),
    "return_num_input_tokens": (_BOOL, [1]),
    "return_num_output_tokens": (_BOOL, [1]),
    "return_cached_tokens": (_BOOL, [1]),
    "return_token_ids": (_BOOL, [1]),
    "return_error": (_BOOL, [1]),
    "control": (_STRING, [1]),
    "channel": ("TYPE_UINT8", [-1]),  # of our own clients: a ChannelOrders
}

OUTPUTS: dict[str, tuple[str, list[int]]] = {
    "text_output": (_STRING, [-1]),
    "finish_reason": (_STRING, [-1]),
    "cumulative_logprob": ("TYPE_FP32", [-1]),
    "logprobs": (_STRING, [-1]),
    "prompt_logprobs": (_STRING, [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
    "cached_tokens": ("TYPE_UINT32", [1]),
    "token_ids": ("TYPE_INT64", [-1]),
    "tool_calls": (_STRING, [-1]),
    "reasoning_output": (_STRING, [-1]),
    "embedding": ("TYPE_FP32", [-1]),
    "index": ("TYPE_UINT32", [-1]),
    "error": (_STRING, [-1]),
    "control_output": (_STRING, [-1]),
    "channel_output": ("TYPE_UINT8", [-1]),  # a ChannelNews
}


@dataclass(frozen=True, slots=True)
class Returns:
    """Which outputs beside the text the client asked for."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    cached_tokens: bool = False
    token_ids: bool = False
    error: bool = False  # a failure comes as the `error` tensor, not as a Triton error


def read_returns(request: Any) -> Returns:
    """The return_* inputs. Never raises: what cannot be read counts as not asked for."""
    asked: dict[str, bool] = {}
    for name in Returns.__dataclass_fields__:
        try:
            asked[name] = bool(_read_bool(request, f"return_{name}"))
        except RequestError:
            asked[name] = False
    return Returns(**asked)


def read_control(request: Any) -> str | None:
    """The control input, None for a request to generate. Raises RequestError."""
    value = _read_bytes(request, "control")
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError("control must be valid UTF-8.", param="control") from None


def read_channel(request: Any) -> ChannelOrders | None:
    """The channel input, None for any other request. Raises RequestError."""
    array = _read_array(request, "channel")
    if array is None:
        return None
    try:
        return _ORDERS.decode(array.tobytes())
    except (msgspec.MsgspecError, UnicodeError):
        raise RequestError("channel must hold ChannelOrders.", param="channel") from None


def read_request(request: Any, returns: Returns) -> RawRequest:
    """Copy a request out of Triton's shared memory. Raises RequestError, naming the input."""
    return RawRequest(
        text_input=_read_bytes(request, "text_input"),
        messages=_read_bytes(request, "messages"),
        input_ids=_read_ids(request, "input_ids"),
        images=_read_files(request, "image"),
        stream=bool(_read_bool(request, "stream")),
        sampling_parameters=_read_bytes(request, "sampling_parameters"),
        parameters=_read_parameters(request),
        exclude_input_in_output=_read_bool(request, "exclude_input_in_output"),
        return_finish_reason=returns.finish_reason,
        return_cumulative_logprob=returns.cumulative_logprob,
        return_logprobs=returns.logprobs,
        return_num_input_tokens=returns.num_input_tokens,
        return_num_output_tokens=returns.num_output_tokens,
        return_cached_tokens=returns.cached_tokens,
        return_token_ids=returns.token_ids,
        return_error=returns.error,
    )


class TritonReply:
    """The response sender of one request, kept to its rules: one final flag, nothing after it.

    Asking whether a closed request is cancelled would have the server look at freed memory, so a
    lock keeps the question and the final send apart. A sender is let go as soon as it is closed:
    what the server keeps for its request, and with it the model, lives as long as the sender.
    """

    def __init__(self, request: Any, returns: Returns = Returns()) -> None:
        self._sender = request.get_response_sender()  # None: closed
        self.returns = returns
        self._lock = threading.Lock()

    def send(self, chunk: Chunk, *others: Chunk) -> None:
        """Send one response, the last one where a chunk is final; ``others`` are of further
        choices of the same request."""
        if chunk.error is not None and not self.returns.error:
            response = pb_utils.InferenceResponse(
                output_tensors=[], error=_triton_error(chunk.error)
            )
        elif chunk.finish_reason is FinishReason.CANCELLED:
            response = None  # nobody is there to read an answer
        else:
            response = pb_utils.InferenceResponse(
                output_tensors=_output_tensors((chunk, *others), self.returns)
            )
        self._send(response, any(part.final for part in (chunk, *others)))

    def send_control(self, payload: str, final: bool) -> None:
        """Send one answer to a control request."""
        tensors = [_string_tensor("control_output", payload)]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final)

    def send_news(self, payload: bytes, final: bool) -> None:
        """Send one response of a channel."""
        tensor = pb_utils.Tensor("channel_output", np.frombuffer(payload, np.uint8))
        self._send(pb_utils.InferenceResponse(output_tensors=[tensor]), final)

    def is_cancelled(self) -> bool:
        """Whether the client has gone; a round trip to the server. False once closed."""
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())

    def abandon(self) -> None:
        """Close without a response, if still open."""
        self._send(None, final=True)

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self._sender is None:
                return
            if not final:
                self._sender.send(response)
                return
            # A sender counts itself as closed as soon as it sees the flag, even if it then fails.
            sender, self._sender = self._sender, None
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if response is None:
                sender.send(flags=flags)
            else:
                sender.send(response, flags=flags)


def _output_tensors(chunks: Sequence[Chunk], returns: Returns) -> list[Any]:
    """An element a chunk in each tensor but ``token_ids``, which has those of all chunks, and what
    is of the request as a whole."""
    first = chunks[0]
    tensors = [_string_tensor("text_output", *(chunk.text for chunk in chunks))]
    has_choices = first.index is not None
    if has_choices:
        tensors.append(_tensor("index", [chunk.index for chunk in chunks], np.uint32))
    if first.error is not None:
        tensors.append(_string_tensor("error", json.dumps(first.error.to_dict())))
    if any(chunk.finish_reason is not None for chunk in chunks) and (
        returns.finish_reason or first.error is not None
    ):
        reasons = (chunk.finish_reason.value if chunk.finish_reason else "" for chunk in chunks)
        tensors.append(_string_tensor("finish_reason", *reasons))
    logprobs = [chunk.cumulative_logprob for chunk in chunks]
    if returns.cumulative_logprob and None not in logprobs:
        tensors.append(_tensor("cumulative_logprob", logprobs, np.float32))
    if returns.logprobs and any(chunk.logprobs for chunk in chunks):
        tensors.append(_string_tensor("logprobs", *(logprobs_json(c.logprobs) for c in chunks)))
    if any(chunk.tool_calls for chunk in chunks):
        calls = (tool_calls_json(chunk.tool_calls) for chunk in chunks)
        tensors.append(_string_tensor("tool_calls", *calls))
    if first.embedding:
        tensors.append(_tensor("embedding", list(first.embedding), np.float32))
    if any(chunk.reasoning for chunk in chunks):
        tensors.append(_string_tensor("reasoning_output", *(chunk.reasoning for chunk in chunks)))
    if first.prompt_logprobs:  # which the sampling parameters asked for
        tensors.append(_string_tensor("prompt_logprobs", logprobs_json(first.prompt_logprobs)))
    if returns.num_input_tokens:
        num_input_tokens = max(chunk.num_input_tokens for chunk in chunks)
        tensors.append(_tensor("num_input_tokens", [num_input_tokens], np.uint32))
    if returns.num_output_tokens or (returns.token_ids and has_choices):  # they part the token ids
        counts = [chunk.num_new_tokens for chunk in chunks]
        tensors.append(_tensor("num_output_tokens", counts, np.uint32))
    if returns.cached_tokens:
        cached_tokens = max(chunk.cached_tokens for chunk in chunks)
        tensors.append(_tensor("cached_tokens", [cached_tokens], np.uint32))
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    if returns.token_ids and token_ids:
        tensors.append(_tensor("token_ids", token_ids, np.int64))
    return tensors


def _triton_error(error: RequestError) -> Any:
    """For clients that did not ask for the error tensor. Triton has no code for 429."""
    codes = pb_utils.TritonError
    if error.status == 404:
        code = codes.NOT_FOUND
    elif error.status in (429, 503):
        code = codes.UNAVAILABLE
    elif error.status == 501:
        code = codes.UNSUPPORTED
    else:
        code = codes.INVALID_ARG if error.status < 500 else codes.INTERNAL
    message = error.message
    if error.retry_after_ms is not None:
        message += f" Retry after {error.retry_after_ms} ms."
    return codes(message, code)


def _tensor(name: str, values: list[Any], dtype: Any) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))


def _string_tensor(name: str, *texts: str) -> Any:
    # Half of a surrogate pair (a client can send one in JSON) has no UTF-8 form.
    encoded = [text.encode("utf-8", errors="replace") for text in texts]
    return pb_utils.Tensor(name, np.array(encoded, dtype=np.object_))


def _read_array(request: Any, name: str) -> np.ndarray[Any, Any] | None:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    try:
        return np.asarray(tensor.as_numpy()).reshape(-1)
    except Exception:
        raise RequestError(f"{name} cannot be read.", param=name, code="invalid_type") from None


def _read_bytes(request: Any, name: str) -> bytes | None:
    array = _read_array(request, name)
    if array is None:
        return None
    if array.size != 1:
        raise RequestError(f"{name} must hold exactly one string.", param=name)
    value = array[0]
    if not isinstance(value, bytes):
        raise RequestError(f"{name} must be a string.", param=name, code="invalid_type")
    return value


def _read_files(request: Any, name: str) -> list[bytes] | None:
    array = _read_array(request, name)
    if array is None:
        return None
    files = array.tolist()
    if not all(isinstance(data, bytes) for data in files):
        raise RequestError(f"{name} must hold strings.", param=name, code="invalid_type")
    return files


def _read_bool(request: Any, name: str) -> bool | None:
    array = _read_array(request, name)
    if array is None:
        return None
    if array.size != 1 or array.dtype != np.bool_:
        raise RequestError(f"{name} must hold one boolean.", param=name, code="invalid_type")
    return bool(array[0])


def _read_ids(request: Any, name: str) -> list[int] | None:
    array = _read_array(request, name)
    if array is None:
        return None
    if not np.issubdtype(array.dtype, np.integer):
        raise RequestError(f"{name} must hold whole numbers.", param=name, code="invalid_type")
    ids: list[int] = array.tolist()
    return ids


def _read_parameters(request: Any) -> dict[str, Any]:
    try:
        values = json.loads(request.parameters() or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise RequestError("The request's parameters cannot be read.", param="parameters")
    return values
