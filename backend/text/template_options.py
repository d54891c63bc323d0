"""How a chat's prompt ends, and what a client may tell the template."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.scheduler.errors import RequestError

FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
# What templates of served families read. Others could shadow what the server itself tells them.
FLAGS = ("enable_thinking", "thinking", "preserve_thinking", "tools_in_user_message")
WORDS = ("reasoning_effort", "date_string")
_WORD = re.compile(r"[\w .,:/-]{0,64}")  # spells no special token of any family


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """``continues``: the prompt ends inside the last message, which the answer goes on with."""

    add_generation_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


def take_template_options(values: dict[str, Any]) -> TemplateOptions:
    """Remove these fields from ``values``. Raises RequestError, naming the field."""
    add, continues, variables = (values.pop(name, None) for name in FIELDS)
    for name, value in (("add_generation_prompt", add), ("continue_final_message", continues)):
        if not isinstance(value, bool | None):
            raise RequestError(f"{name} must be true or false.", param=name, code="invalid_type")
    if continues and add:
        raise RequestError(
            "continue_final_message cannot be used with add_generation_prompt.",
            param="continue_final_message",
        )
    return TemplateOptions(
        not continues if add is None else add, bool(continues), _check(variables)
    )


def _check(variables: Any) -> dict[str, Any]:
    if variables is None:
        return {}
    where = "chat_template_kwargs"
    if not isinstance(variables, dict):
        raise RequestError(f"{where} must be an object.", param=where, code="invalid_type")
    for name, value in variables.items():
        param = f"{where}.{name[:64]}"
        if name in FLAGS:
            is_good, wanted = isinstance(value, bool), "true or false"
        elif name in WORDS:
            is_good = isinstance(value, str) and _WORD.fullmatch(value) is not None
            wanted = "at most 64 letters, digits and spaces"
        else:
            raise RequestError(
                f"{param} is not allowed. Allowed: {', '.join(FLAGS + WORDS)}.",
                param=param,
                code="unknown_parameter",
            )
        if not is_good:
            raise RequestError(f"{param} must be {wanted}.", param=param)
    return variables
