"""Requests and responses of the ``shoal`` backend as Triton tensors, without copies of our own."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput

from shoal.client.errors import ShoalError
from shoal.client.types import Delta, Heartbeat

HEARTBEAT_FIELDS = {
    name: kind for name, kind in Heartbeat.__annotations__.items() if kind in (str, int, float)
}
HEARTBEAT_OBJECTS = [name for name in Heartbeat.__annotations__ if name not in HEARTBEAT_FIELDS]


def string_input(name: str, value: str) -> InferInput:
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise ShoalError(f"{name} holds text that is not valid Unicode.", 400) from None
    tensor = InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([data], dtype=np.object_))
    return tensor


def bool_input(name: str, value: bool) -> InferInput:
    tensor = InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value], dtype=np.bool_))
    return tensor


def checked_token_ids(token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Raises ShoalError for what are no whole numbers."""
    try:
        ids = np.asarray(token_ids)
    except (OverflowError, ValueError, TypeError):
        ids = np.empty((0, 0))
    # Signed kind: floats and booleans would be cast silently, larger numbers come as objects.
    if ids.ndim != 1 or ids.dtype.kind != "i":
        raise ShoalError("Token ids must be a list of whole numbers.", 400, "invalid_type")
    return ids.astype(np.int64)


def token_ids_input(token_ids: Sequence[int]) -> InferInput:
    ids = checked_token_ids(token_ids)
    tensor = InferInput("input_ids", [len(ids)], "INT64")
    tensor.set_data_from_numpy(ids)
    return tensor


def encode_sampling(sampling: dict[str, Any]) -> str:
    """Sampling parameters as JSON, which has no NaN and no infinity."""
    for name, value in sampling.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ShoalError(
                f"{name} must be a finite number.", 400, "invalid_value", param=name[:64]
            )
    try:
        return json.dumps(sampling, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ShoalError(
            "Sampling parameters must be numbers, strings, booleans and lists of them.",
            400,
            "invalid_type",
            detail=str(error),
        ) from None


def num_choices(sampling: Mapping[str, Any] | None) -> int:
    """How many answers will end. What is no number of choices the backend refuses."""
    wanted = (sampling or {}).get("n")
    return wanted if isinstance(wanted, int) and wanted > 1 else 1


def decode_outputs(response: Any) -> dict[str, Any]:
    """Output tensors of a ModelInferResponse by name: first elements, but all ``token_ids`` and
    every ``index``.

    Reads the raw buffers directly: this runs for every response of every stream.
    """
    values: dict[str, Any] = {}
    raw_contents = response.raw_output_contents
    for output, raw in zip(response.outputs, raw_contents, strict=False):
        if not raw:
            continue
        if output.name == "token_ids":
            values["token_ids"] = struct.unpack(f"<{len(raw) // 8}q", raw)
        elif output.name == "index":
            values["index"] = struct.unpack(f"<{len(raw) // 4}I", raw)
        elif output.name == "embedding":
            values["embedding"] = raw
        elif output.datatype == "BYTES":
            size = int.from_bytes(raw[:4], "little")
            values[output.name] = raw[4 : 4 + size].decode("utf-8", "replace")
        elif output.datatype in SCALARS:
            values[output.name] = SCALARS[output.datatype].unpack_from(raw)[0]
    return values


SCALARS = {
    "UINT32": struct.Struct("<I"),
    "INT32": struct.Struct("<i"),
    "UINT64": struct.Struct("<Q"),
    "INT64": struct.Struct("<q"),
    "FP32": struct.Struct("<f"),
    "BOOL": struct.Struct("<?"),
}


def read_deltas(response: Any) -> list[Delta]:
    """Decode one response: a delta for each choice that it tells of. Raises the ShoalError that it
    carries, if any."""
    try:
        values = decode_outputs(response)
        if error_json := values.get("error"):
            raise ShoalError.from_json(error_json)
        indices = values.pop("index", (0,))
        if len(indices) == 1:
            return [_delta(values, indices[0])]
        parts = _by_choice(response, len(indices), values)
    except (struct.error, IndexError) as error:
        raise ShoalError(
            "The model server sent a malformed response.", 502, "bad_gateway", detail=str(error)
        ) from None
    return [_delta(part, index) for part, index in zip(parts, indices, strict=True)]


def _by_choice(response: Any, num_choices: int, first: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of each choice. Tensors of one element are of them all; the token ids are parted
    by their numbers."""
    parts = [dict(first) for _ in range(num_choices)]
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name in ("token_ids", "index"):
            continue
        if output.datatype == "BYTES":
            elements: Sequence[Any] = _strings(raw)
        else:
            elements = [values[0] for values in SCALARS[output.datatype].iter_unpack(raw)]
        for idx, part in enumerate(parts):
            part[output.name] = elements[idx if len(elements) > 1 else 0]
    start = 0
    for part in parts:
        end = start + part.get("num_output_tokens", 0)
        part["token_ids"] = first.get("token_ids", ())[start:end]
        start = end
    return parts


def _strings(raw: bytes) -> list[str]:
    found = []
    position = 0
    while position < len(raw):
        (size,) = SCALARS["UINT32"].unpack_from(raw, position)
        position += 4
        found.append(raw[position : position + size].decode("utf-8", "replace"))
        position += size
    return found


def _delta(values: dict[str, Any], index: int) -> Delta:
    return Delta(
        text=values.get("text_output", ""),
        token_ids=values.get("token_ids", ()),
        num_output_tokens=values.get("num_output_tokens", 0),
        num_input_tokens=values.get("num_input_tokens", 0),
        num_cached_tokens=values.get("cached_tokens", 0),
        finish_reason=values.get("finish_reason") or None,
        logprobs=values.get("logprobs") or None,
        prompt_logprobs=values.get("prompt_logprobs") or None,
        embedding=values.get("embedding", b""),
        reasoning=values.get("reasoning_output", ""),
        tool_calls=values.get("tool_calls") or None,
        cumulative_logprob=values.get("cumulative_logprob"),
        index=index,
    )


def read_heartbeat(response: Any) -> Heartbeat | None:
    """Decode a control response; None when it holds no heartbeat (an empty final response)."""
    try:
        text = decode_outputs(response).get("control_output")
        payload = json.loads(text) if text else None
    except (struct.error, ValueError):
        return None
    if not isinstance(payload, dict) or not isinstance(payload.get("state"), str):
        return None
    fields: dict[str, Any] = {}
    for name, kind in HEARTBEAT_FIELDS.items():
        value = payload.get(name)
        if value is not None:
            fields[name] = kind(value)
    for name in HEARTBEAT_OBJECTS:
        if isinstance(payload.get(name), dict):
            fields[name] = payload[name]
    return Heartbeat(**fields)


def read_answer(response: Any) -> dict[str, Any] | None:
    """The object in a control response; None when it holds none (an empty final response). Raises
    the ShoalError that it carries, if any."""
    values = decode_outputs(response)
    if error_json := values.get("error"):
        raise ShoalError.from_json(error_json)
    text = values.get("control_output")
    answer = json.loads(text) if text else None
    return answer if isinstance(answer, dict) else None
