"""Tensors and responses of the fake tritonserver, framed as the real one frames them."""

import json
import struct
from collections.abc import Callable
from typing import Any

from fake_pieces import Piece
from tritonclient.grpc import service_pb2

STRING_INPUTS = ("text_input", "messages", "sampling_parameters", "control")
RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens")
RETURNS += ("num_output_tokens", "cached_tokens", "token_ids", "error")
BOOL_INPUTS = ("stream", "exclude_input_in_output", *(f"return_{name}" for name in RETURNS))


class Reply:
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


def piece_outputs(
    piece: Piece, inputs: dict[str, Any], num_input_tokens: int, num_cached_tokens: int
) -> list[tuple[str, str, list[int], bytes]]:
    asked = {name for name in RETURNS if inputs.get(f"return_{name}")}
    parts = (piece, *piece.beside)
    ids = [number for part in parts for number in range(part.num_tokens)]
    outputs = {
        "text_output": string_tensor("text_output", *(part.text for part in parts)),
        "num_input_tokens": uint32_tensor("num_input_tokens", num_input_tokens),
        "num_output_tokens": uint32_tensor(
            "num_output_tokens", *(part.num_tokens for part in parts)
        ),
        "cached_tokens": uint32_tensor("cached_tokens", num_cached_tokens),
        "token_ids": ("token_ids", "INT64", [len(ids)], struct.pack(f"<{len(ids)}q", *ids)),
    }
    if piece.index is not None:
        outputs["index"] = uint32_tensor("index", *(part.index for part in parts))
        asked.add("index")
    if any(part.finish_reason is not None for part in parts):
        reasons = (part.finish_reason or "" for part in parts)
        outputs["finish_reason"] = string_tensor("finish_reason", *reasons)
    if piece.error is not None:
        outputs["finish_reason"] = string_tensor("finish_reason", "error")
        outputs["error"] = string_tensor("error", json.dumps(piece.error))
    if piece.tool_calls:
        outputs["tool_calls"] = string_tensor("tool_calls", json.dumps(piece.tool_calls))
        asked.add("tool_calls")
    if piece.reasoning:
        outputs["reasoning_output"] = string_tensor("reasoning_output", piece.reasoning)
        asked.add("reasoning_output")
    if piece.embedding:
        raw = struct.pack(f"<{len(piece.embedding)}f", *piece.embedding)
        outputs["embedding"] = ("embedding", "FP32", [len(piece.embedding)], raw)
        asked.add("embedding")
    if piece.prompt_logprobs:
        outputs["prompt_logprobs"] = string_tensor(
            "prompt_logprobs", json.dumps(piece.prompt_logprobs)
        )
        asked.add("prompt_logprobs")
    if piece.logprobs:
        outputs["logprobs"] = string_tensor("logprobs", json.dumps(piece.logprobs))
    return [value for name, value in outputs.items() if name == "text_output" or name in asked]


def string_tensor(name: str, *texts: str) -> tuple[str, str, list[int], bytes]:
    data = [text.encode() for text in texts]
    raw = b"".join(len(item).to_bytes(4, "little") + item for item in data)
    return name, "BYTES", [len(texts)], raw


def uint32_tensor(name: str, *values: int) -> tuple[str, str, list[int], bytes]:
    return name, "UINT32", [len(values)], struct.pack(f"<{len(values)}I", *values)


def parameter_value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("parameter_choice"))
