"""Names the field that makes a text almost, but not quite, JSON."""

import json
import math
from typing import Any


def non_finite_field(text: str | bytes) -> str | None:
    """The first field that is NaN or infinite, in a text that is JSON but for that.

    JSON has no such numbers, though many writers write them; a client is helped more by the
    field's name than by a position. None when that is not what is wrong.
    """
    try:
        values = json.loads(text)  # unlike the specification, takes NaN, Infinity and 1e999
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, Any]] = [("the value", values)]
    for name, value in pending:  # grows while it is walked: no recursion
        if isinstance(value, float) and not math.isfinite(value):
            return name
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += ((name, item) for item in value)
    return None
