"""JSON from models and clients, where the standard library would take more than JSON."""

import json
import math
from typing import Any


def non_finite_field(text: str | bytes) -> str | None:
    """The first field that is NaN or infinite (``a.b`` in an object), in a text that is JSON but
    for that.

    JSON has no such numbers, though many writers write them; a client is helped more by the
    field's name than by a position. None when that is not what is wrong.
    """
    try:
        values = json.loads(text)  # unlike the specification, takes NaN, Infinity and 1e999
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, Any]] = [("", values)]
    for name, value in pending:  # grows while it is walked: no recursion
        if isinstance(value, float) and not math.isfinite(value):
            return name or "the value"
        if isinstance(value, dict):
            prefix = f"{name}." if name else ""
            pending += ((prefix + key, item) for key, item in value.items())
        elif isinstance(value, list):
            pending += ((name, item) for item in value)
    return None


MAX_DEPTH = 32


def sound_json(text: str) -> Any:
    """Decode JSON that can be written again and walked by recursion. Raises ValueError.

    So no NaN, no infinity (``1e999`` is one), no half of a surrogate pair, no deep nesting.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise ValueError("nested too deeply")
