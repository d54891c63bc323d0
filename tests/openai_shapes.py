"""Strict checks of answers against the official client's own types: no field more, none missing."""

import functools
import json
import types
import typing
from collections.abc import Iterable
from typing import Any

import pydantic

# Fields that are ours, by object.
EXTENSIONS = {"reasoning_content", "max_model_len", "ready"}

# Required by OpenAI's document (``openai_document``), not yet known to the client.
NEWER_FIELDS = {("ResponseFunctionCallArgumentsDoneEvent", "name")}


def check(kind: Any, value: Any) -> None:
    """Raise unless ``value``, decoded JSON, is one of ``kind`` with no unknown field."""
    _adapter(kind).validate_python(value, strict=True)
    problem = _unknown_field(kind, value, "")
    assert problem is None, problem


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _unknown_field(kind: Any, value: Any, where: str) -> str | None:
    """The first field that ``kind`` does not know; the library's own types let all pass."""
    kind = _bare(kind)
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        branches = [branch for branch in typing.get_args(kind) if _fits(branch, value)]
        problems = [_unknown_field(branch, value, where) for branch in branches]
        return None if not problems or None in problems else problems[0]
    if isinstance(value, list) and typing.get_origin(kind) in (list, Iterable):
        (inner,) = typing.get_args(kind)
        found = (_unknown_field(inner, item, f"{where}[{idx}]") for idx, item in enumerate(value))
        return next((problem for problem in found if problem), None)
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        for name, item in value.items():
            if name in EXTENSIONS or (kind.__name__, name) in NEWER_FIELDS:
                continue
            if name not in fields:
                return f"{kind.__name__} has no {where}.{name}"
            problem = _unknown_field(fields[name].annotation, item, f"{where}.{name}")
            if problem:
                return problem
    return None


def _bare(kind: Any) -> Any:
    alias = getattr(kind, "__value__", None)  # of a TypeAliasType
    if alias is not None:
        return _bare(alias)
    if typing.get_origin(kind) is typing.Annotated:
        return _bare(typing.get_args(kind)[0])
    return kind


def _fits(kind: Any, value: Any) -> bool:
    try:
        _adapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError:
        return False
    return True


def sse_events(text: str) -> list[Any]:
    """The decoded data of a stream's events, each of which ends with an empty line."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.split("data: ", 1)[1] for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
