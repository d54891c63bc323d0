"""/v1/embeddings: pooled hidden states of the served model."""

import base64
import struct
from typing import Any

import orjson

from shoal.client.errors import ShoalError
from shoal.client.openai.generation import ChoiceDelta, Task
from shoal.client.openai.prompts import read_prompts
from shoal.client.openai.request_models import LabelledBody
from shoal.client.types import Usage

ENCODINGS = ("float", "base64")
# What the backend calls them, and what they are called here.
CALLERS_NAMES = {"text_input": "input", "input_ids": "input"}


class EmbeddingsBody(LabelledBody):
    """POST /v1/embeddings. ``pooling`` (mean or last) is ours."""

    input: Any
    dimensions: int | None = None
    encoding_format: str | None = None
    pooling: str | None = None

    def check(self) -> None:
        LabelledBody.check(self)
        if self.encoding_format not in (None, *ENCODINGS):
            raise ShoalError(
                f"encoding_format must be one of {', '.join(ENCODINGS)}.",
                400,
                "invalid_value",
                "encoding_format",
            )

    def task(self, max_inputs: int) -> Task:
        """Raises ShoalError (400) naming the input."""
        sampling: dict[str, Any] = {"pooling": self.pooling or "mean"}
        if self.dimensions is not None:
            sampling["dimensions"] = self.dimensions
        return Task(self.model, read_prompts(self.input, max_inputs, "input"), sampling)


class EmbeddingsWire:
    """The format of the answer; it is never streamed."""

    def __init__(self, body: EmbeddingsBody) -> None:
        self._model = body.model
        self._as_base64 = body.encoding_format == "base64"

    def body(self, choices: list[ChoiceDelta], usage: Usage) -> bytes:
        data = [
            {
                "object": "embedding",
                "index": choice.index,
                "embedding": self._encode(choice.embedding),
            }
            for choice in choices
        ]
        count = usage.prompt_tokens
        return orjson.dumps(
            {
                "object": "list",
                "data": data,
                "model": self._model,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )

    def _encode(self, embedding: bytes) -> str | list[float]:
        if not embedding:
            raise ShoalError("The model server sent no embedding.", 502, "bad_gateway")
        if self._as_base64:
            return base64.b64encode(embedding).decode()
        return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))

    def start_events(self, index: int) -> bytes:
        raise NotImplementedError

    def delta_events(self, delta: ChoiceDelta) -> bytes:
        raise NotImplementedError

    def end_events(self, usage: Usage) -> bytes:
        raise NotImplementedError

    def error_event(self, error: ShoalError) -> bytes:
        raise NotImplementedError
