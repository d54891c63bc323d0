"""What a client is told when the server, not the request, is the reason."""

from shoal.scheduler.errors import RequestError


def shutting_down() -> RequestError:
    return RequestError("The server is shutting down.", code="shutting_down", status=503)


def internal_error() -> RequestError:
    return RequestError("The server failed on this request.", code="internal_error", status=500)


def no_worker() -> RequestError:
    return RequestError(
        "The model's worker cannot be started at present.",
        code="worker_unavailable",
        status=503,
        retry_after_ms=10_000,
    )
