"""The two requests that need only the text side: text or messages to token ids, and back."""

import json
from dataclasses import dataclass
from typing import Any

from shoal.backend.intake import Intake
from shoal.backend.raw_request import RawRequest
from shoal.scheduler.errors import RequestError

TOKENIZE, DETOKENIZE = "tokenize", "detokenize"
_FLAGS = ("add_special_tokens", "return_token_strs")


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A ``control`` of one of these ops; what it is about comes in the request's other inputs.

    ``add_special_tokens`` (None: the model's own BOS before text, nothing before a chat, whose
    template writes it) and ``return_token_strs`` are of ``tokenize``.
    """

    op: str
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @classmethod
    def from_control(cls, control: str) -> "TextRequest | None":
        """None: the control asks for something else. Raises RequestError, naming the field."""
        try:
            values = json.loads(control[:4096])
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or values.get("op") not in (TOKENIZE, DETOKENIZE):
            return None
        op = values.pop("op")
        allowed = _FLAGS if op == TOKENIZE else ()
        for name, value in values.items():
            if name not in allowed:
                raise RequestError(
                    f"Unknown field {name[:64]!r} in control for op {op!r}.",
                    param=f"control.{name[:64]}",
                    code="unknown_parameter",
                )
            if not isinstance(value, bool | None):
                raise RequestError(f"{name} must be true or false.", param=name)
        return cls(op, values.get(_FLAGS[0]), bool(values.get(_FLAGS[1])))

    def answer(self, intake: Intake, raw: RawRequest) -> dict[str, Any]:
        """What goes into ``control_output``. Raises RequestError."""
        if self.op == DETOKENIZE:
            return {"prompt": intake.prompter.detokenize(raw)}
        token_ids = intake.tokenize(raw, self.add_special_tokens)
        strs = intake.prompter.token_strs(token_ids) if self.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": intake.prompter.max_model_len,
            "tokens": token_ids,
            "token_strs": strs,
        }
