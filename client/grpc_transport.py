"""The SDK's way over Triton's gRPC."""

from collections.abc import Mapping
from typing import Any

from shoal.client.transports import AnswerStream, Prompt, check_prompt, is_chat
from shoal.client.triton_stream import TritonStream
from shoal.client.types import ModelInfo


class GrpcTransport:
    """See Transport."""

    def __init__(self, url: str) -> None:
        self._triton = TritonStream(url)

    def generate(
        self,
        model: str,
        version: str,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        stream: bool,
        timeout_s: float | None,
    ) -> AnswerStream:
        return self._triton.generate(
            model,
            version,
            **_prompt_argument(prompt),
            sampling=sampling,
            stream=stream,
            return_token_ids=True,
            timeout_s=timeout_s,
        )

    async def models(self) -> list[ModelInfo]:
        return await self._triton.models()

    async def is_ready(self, model: str) -> bool:
        return (await self._triton.status(model)).state == "ready"

    async def close(self) -> None:
        await self._triton.close()


def _prompt_argument(prompt: Prompt) -> dict[str, Any]:
    """The keyword of TritonStream.generate that a prompt of this kind goes to."""
    check_prompt(prompt)
    if isinstance(prompt, str):
        return {"text_input": prompt}
    return {"messages" if is_chat(prompt) else "input_ids": prompt}
