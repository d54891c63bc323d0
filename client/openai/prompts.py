"""The prompt of a request in the three forms that the backend takes."""

from dataclasses import dataclass
from typing import Any

import orjson

from shoal.client.errors import ShoalError

MAX_TOKEN_ID = 2**31 - 1
CHARACTERS_PER_TOKEN = 4  # about, in English


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of text, chat messages (as JSON) and token ids."""

    text_input: str | None = None
    messages: str | None = None
    input_ids: tuple[int, ...] | None = None

    @property
    def estimated_tokens(self) -> int:
        if self.input_ids is not None:
            return len(self.input_ids)
        return len(self.text_input or self.messages or "") // CHARACTERS_PER_TOKEN


def read_messages(messages: list[dict[str, Any]]) -> Prompt:
    """The backend checks roles and content; only the empty list is refused here."""
    if not messages:
        raise ShoalError("messages must hold at least one message.", 400, None, "messages")
    return Prompt(messages=orjson.dumps(messages).decode())


def read_prompts(prompt: Any, max_prompts: int, param: str = "prompt") -> list[Prompt]:
    """A string, token ids, or a list of either. Raises ShoalError (400) naming ``param``."""
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return [_read_prompt(prompt, param)]
    if not isinstance(prompt, list):
        raise _wrong_type(param)
    if not 1 <= len(prompt) <= max_prompts:
        raise ShoalError(
            f"{param} must hold 1 to {max_prompts} prompts.", 400, "invalid_value", param
        )
    return [_read_prompt(item, f"{param}[{index}]") for index, item in enumerate(prompt)]


def _read_prompt(item: Any, param: str) -> Prompt:
    if not isinstance(item, str | list):
        raise _wrong_type(param)
    if not item:
        raise ShoalError(f"{param} must not be empty.", 400, "invalid_value", param)
    if isinstance(item, str):
        return Prompt(text_input=item)
    # Lists may be long, and this runs in the event loop: only passes at C speed.
    if set(map(type, item)) != {int}:
        raise _wrong_type(param)
    if min(item) < 0 or max(item) > MAX_TOKEN_ID:
        raise ShoalError(
            f"{param} must hold token ids of the model's vocabulary.", 400, "invalid_value", param
        )
    return Prompt(input_ids=tuple(item))


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int


def _wrong_type(param: str) -> ShoalError:
    return ShoalError(
        f"{param} must be a string, a list of token ids, or (the whole prompt) a list of either.",
        400,
        "invalid_type",
        param,
    )
