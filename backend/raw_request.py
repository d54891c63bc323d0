"""A request's inputs, decoded but not checked, and the reading of text and JSON among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from shoal.backend.strict_json import non_finite_field
from shoal.scheduler.errors import RequestError

MAX_PROMPT_BYTES = 4 * 1024 * 1024  # whatever the context length
MAX_JSON_DEPTH = 32

ParameterValue = str | int | float | bool


@dataclass(slots=True)
class RawRequest:
    """The input tensors of one request, decoded but not checked. None: the tensor was not sent.

    ``messages`` and ``sampling_parameters`` hold JSON. ``parameters`` are Triton's request
    parameters; over gRPC they carry only bool, int and str, so ``"0.7"`` counts as 0.7 there.
    """

    text_input: str | bytes | None = None
    messages: str | bytes | None = None
    input_ids: list[int] | None = None
    images: list[bytes] | None = None
    stream: bool = False
    sampling_parameters: str | bytes | None = None
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_cached_tokens: bool = False
    return_token_ids: bool = False
    return_error: bool = False
    control: str | bytes | None = None


def prompt_source(raw: RawRequest) -> str:
    given = [
        name for name in ("text_input", "messages", "input_ids") if getattr(raw, name) is not None
    ]
    if len(given) != 1:
        found = "none" if not given else " and ".join(given)
        raise RequestError(
            f"Send exactly one of text_input, messages and input_ids (found {found}).",
            param=given[1] if given else "text_input",
            code="invalid_value" if given else "missing_parameter",
        )
    return given[0]


def decode_text(name: str, value: str | bytes | None) -> str:
    assert value is not None
    if len(value) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"{name} must have at most {MAX_PROMPT_BYTES} bytes.",
            param=name,
            code="context_length_exceeded",
        )
    try:
        # A lone surrogate cannot be tokenised, so it must not pass as a str either.
        return value.decode() if isinstance(value, bytes) else value.encode().decode()
    except UnicodeError:
        raise RequestError(f"{name} must be valid UTF-8 text.", param=name) from None


def decode_json(name: str, value: str | bytes | None, max_bytes: int) -> Any:
    """Decode JSON with bounded size and depth. NaN and Infinity are not JSON."""
    assert value is not None
    if len(value) > max_bytes:
        raise RequestError(f"{name} must have at most {max_bytes} bytes.", param=name)
    try:
        data = orjson.loads(value)
    except (orjson.JSONDecodeError, UnicodeError):
        raise _not_json(name, value) from None
    _check_depth(name, data)
    return data


def _not_json(name: str, value: str | bytes) -> RequestError:
    culprit = non_finite_field(value)
    if culprit is not None:
        return RequestError(
            f"{culprit[:64]} must be a finite number; NaN and Infinity are not JSON.",
            param=culprit[:64],
        )
    return RequestError(f"{name} must be valid JSON.", param=name, code="invalid_json")


def _check_depth(name: str, data: Any) -> None:
    level = [data]
    for _ in range(MAX_JSON_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise RequestError(f"{name} must be nested at most {MAX_JSON_DEPTH} levels deep.", param=name)
