"""Plain calls with NVIDIA's own client, tensor by tensor, as a foreign user would write them."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient

RETURNS = ("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids")


@dataclass
class Answer:
    """A whole stream, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: dict[str, Any] | None = None
    num_chunks: int = 0


def string_input(name: str, value: str) -> InferInput:
    tensor = InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def bool_input(name: str, value: bool) -> InferInput:
    tensor = InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def ids_input(token_ids: list[int]) -> InferInput:
    tensor = InferInput("input_ids", [len(token_ids)], "INT64")
    tensor.set_data_from_numpy(np.array(token_ids, dtype=np.int64))
    return tensor


def inputs_of(
    prompt: str | list[int] | list[dict[str, Any]], stream: bool, sampling: dict[str, Any]
) -> list[InferInput]:
    """A string is text, a list of numbers is token ids, a list of dicts is chat messages."""
    if isinstance(prompt, str):
        inputs = [string_input("text_input", prompt)]
    elif prompt and isinstance(prompt[0], dict):
        inputs = [string_input("messages", json.dumps(prompt))]
    else:
        inputs = [ids_input([int(token) for token in prompt])]  # type: ignore[call-overload]
    inputs += [
        bool_input("stream", stream),
        bool_input("exclude_input_in_output", True),
        bool_input("return_error", True),
        string_input("sampling_parameters", json.dumps(sampling)),
    ]
    return inputs + [bool_input(f"return_{name}", True) for name in RETURNS]


async def results(
    url: str, model: str, inputs: list[InferInput], **request: Any
) -> AsyncIterator[InferResult]:
    """The responses of one streamed request; closing the iterator cancels it."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": model,
            "inputs": inputs,
            "enable_empty_final_response": True,
            **request,
        }

    async with InferenceServerClient(url) as client:
        stream = client.stream_infer(requests())
        try:
            async for result, error in stream:
                if error is not None:
                    raise error
                yield result
        finally:
            stream.cancel()


async def generate(
    url: str,
    model: str,
    prompt: str | list[int] | list[dict[str, Any]],
    stream: bool = True,
    **sampling: Any,
) -> Answer:
    """Run one request to its end."""
    answer = Answer()
    async for result in results(url, model, inputs_of(prompt, stream, sampling)):
        add(answer, result)
    return answer


def add(answer: Answer, result: InferResult) -> None:
    def text(name: str) -> str:
        value = result.as_numpy(name)
        return "" if value is None or not value.size else value.reshape(-1)[0].decode()

    def ints(name: str) -> list[int]:
        value = result.as_numpy(name)
        return [] if value is None else [int(item) for item in value.reshape(-1)]

    answer.num_chunks += 1
    answer.text += text("text_output")
    answer.token_ids += ints("token_ids")
    answer.num_output_tokens += sum(ints("num_output_tokens"))
    answer.num_input_tokens = max([answer.num_input_tokens, *ints("num_input_tokens")])
    if reason := text("finish_reason"):
        answer.finish_reasons.append(reason)
    if error := text("error"):
        answer.error = json.loads(error)


__all__ = ["Answer", "InferRequestedOutput", "generate", "inputs_of", "results"]
