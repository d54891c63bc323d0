"""The errors of requests: refused, shed or out of time, each with when to retry, or failed."""

from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import StepOutput

MIN_RETRY_MS = 100
MAX_RETRY_MS = 3_600_000
_DRAINING_RETRY_MS = 5_000


def retry_ms(seconds: float) -> int:
    """A retry time within sane bounds."""
    return int(min(MAX_RETRY_MS, max(MIN_RETRY_MS, 1000 * seconds)))


def draining() -> RequestError:
    return RequestError(
        "The server is shutting down. Retry, or use another server.",
        code="draining",
        status=503,
        retry_after_ms=_DRAINING_RETRY_MS,
    )


def queue_full(max_queued_requests: int, retry_after_ms: int) -> RequestError:
    return RequestError(
        f"The queue is full ({max_queued_requests} requests). Retry later.",
        code="queue_full",
        status=429,
        retry_after_ms=retry_after_ms,
    )


def queue_full_of_tokens(max_queued_tokens: int, retry_after_ms: int) -> RequestError:
    return RequestError(
        f"The queue is full ({max_queued_tokens} tokens). Retry later, or with a shorter prompt.",
        code="queue_full",
        status=429,
        retry_after_ms=retry_after_ms,
    )


def deadline(wait_s: float, timeout_s: float) -> RequestError:
    """The queue is longer than the request is willing to wait."""
    return RequestError(
        f"The request would wait about {1000 * wait_s:.0f} ms, longer than its timeout of "
        f"{1000 * timeout_s:.0f} ms. Retry later, or with a longer timeout.",
        param="timeout",
        code="deadline_unmeetable",
        status=429,
        retry_after_ms=retry_ms(max(0.0, wait_s - timeout_s)),
    )


def shed(retry_after_ms: int) -> RequestError:
    return RequestError(
        "The queue is full and a request of a higher tier came. Retry later.",
        code="shed",
        status=429,
        retry_after_ms=retry_after_ms,
    )


def tenant_limit(what: str, limit: int, retry_after_ms: int) -> RequestError:
    return RequestError(
        f"This tenant may have at most {limit} {what} at a time. Retry when some have finished.",
        param="tenant",
        code="tenant_limit",
        status=429,
        retry_after_ms=retry_after_ms,
    )


def tenant_request_too_large(num_tokens: int, limit: int) -> RequestError:
    return RequestError(
        f"The prompt and max_tokens ask for {num_tokens} tokens; this tenant may have at most "
        f"{limit}. Lower max_tokens or shorten the prompt.",
        param="max_tokens",
        code="tenant_limit",
    )


def tenant_choices(num_choices: int, limit: int) -> RequestError:
    return RequestError(
        f"n asks for {num_choices} choices; this tenant may have at most {limit} requests at a "
        "time, and each choice counts. Lower n.",
        param="n",
        code="tenant_limit",
    )


def tenant_prompts(num_prompts: int, num_choices: int, limit: int) -> RequestError:
    choices = f" with {num_choices} choices each" if num_choices > 1 else ""
    return RequestError(
        f"text_input holds {num_prompts} prompts{choices}; this tenant may have at most {limit} "
        "requests at a time, and each counts. Send fewer together.",
        param="text_input",
        code="tenant_limit",
    )


def timed_out(timeout_s: float) -> RequestError:
    return RequestError(
        f"The request did not finish within its timeout of {1000 * timeout_s:.0f} ms.",
        param="timeout",
        code="timeout",
        status=408,
    )


def internal(message: str) -> RequestError:
    return RequestError(message, code="internal_error", status=500)


def of_engine(output: StepOutput) -> RequestError:
    """What an engine says of a sequence that it could not run."""
    if output.error is not None and output.error_param is not None:
        return RequestError(output.error, param=output.error_param, code="unsupported_grammar")
    return internal(output.error or "The model failed on this request.")
