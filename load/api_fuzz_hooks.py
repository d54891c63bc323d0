"""What schemathesis loads beside its own checks: the whole time of each answer, body and all.

Its own ``max_response_time`` ends with the headers, so it says nothing of an event stream. Each
call also becomes a JSON line in the file that ``SHOAL_FUZZ_LOG`` names.
"""

import json
import os
import threading
import time
from typing import Any

import schemathesis

from shoal.load.api_fuzz import LOG_VARIABLE, MAX_RESPONSE_S

# Requests that name no limit get a small one, or most would run into their deadlines. What is
# named stays as it is.
LIMIT_NAMES = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
}
SMALL_LIMIT = 8  # tokens
MAX_LOGGED = 2000  # characters of a body

_lock = threading.Lock()
_here = threading.local()  # a worker's thread makes one call at a time, and then checks it


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: Any
) -> None:
    names = LIMIT_NAMES.get(case.path, ())
    if names and isinstance(case.body, dict) and not any(name in case.body for name in names):
        case.body[names[0]] = SMALL_LIMIT
    _here.begun = time.monotonic()


@schemathesis.hook
def after_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], response: schemathesis.Response
) -> None:
    _write(case, response.status_code)


@schemathesis.hook
def after_network_error(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], request: Any
) -> None:
    """No answer, or not within the client's patience: schemathesis makes an error of it."""
    _write(case, None)


@schemathesis.check
def whole_answer_in_time(
    context: schemathesis.CheckContext,
    response: schemathesis.Response,
    case: schemathesis.Case[Any],
) -> None:
    assert _here.took <= MAX_RESPONSE_S, (
        f"the answer took {_here.took:.2f} s, more than {MAX_RESPONSE_S:g} s"
    )


def _write(case: schemathesis.Case[Any], status: int | None) -> None:
    _here.took = time.monotonic() - _here.begun
    call = {
        "operation": case.operation.label,
        "status": status,
        "seconds": _here.took,
        "body": repr(case.body)[:MAX_LOGGED],
    }
    with _lock, open(os.environ[LOG_VARIABLE], "a", encoding="utf-8") as log:
        log.write(json.dumps(call) + "\n")
