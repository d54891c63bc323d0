"""/tokenize and /detokenize, in vLLM's shapes."""

from typing import Annotated, Any

import orjson
from pydantic import Field

from shoal.client.errors import ShoalError
from shoal.client.openai.prompts import MAX_TOKEN_ID
from shoal.client.openai.request_models import RequestBody, given
from shoal.client.openai.served_models import ServedModel
from shoal.client.triton_stream import TritonStream

CHAT_FIELDS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeBody(RequestBody):
    """Text (``prompt``) or a chat (``messages``, and what shapes its prompt)."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ShoalError(
                "Send exactly one of prompt and messages.", 400, "invalid_value", "prompt"
            )


class DetokenizeBody(RequestBody):
    """Token ids."""

    tokens: Annotated[list[int], Field(fail_fast=True)]

    def check(self) -> None:
        if self.tokens and not (min(self.tokens) >= 0 and max(self.tokens) <= MAX_TOKEN_ID):
            raise ShoalError(
                "tokens must hold token ids of the model's vocabulary.",
                400,
                "invalid_value",
                "tokens",
            )


async def tokenize(triton: TritonStream, model: ServedModel, body: TokenizeBody) -> dict[str, Any]:
    """Raises ShoalError."""
    return await triton.tokenize(
        model.name,
        model.version,
        text_input=body.prompt,
        messages=None if body.messages is None else orjson.dumps(body.messages).decode(),
        add_special_tokens=body.add_special_tokens,
        return_token_strs=bool(body.return_token_strs),
        sampling=given(body, CHAT_FIELDS),
    )


async def detokenize(
    triton: TritonStream, model: ServedModel, body: DetokenizeBody
) -> dict[str, Any]:
    """Raises ShoalError."""
    if not body.tokens:
        return {"prompt": ""}
    return {"prompt": await triton.detokenize(model.name, body.tokens, model.version)}
