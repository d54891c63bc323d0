"""The one exception of the SDK and the shim: an error in the terms of the OpenAI API."""

import json
from dataclasses import dataclass
from typing import Any

# Parts of tritonserver's own messages. A model between unload and load has no available versions,
# so that comes before the unknown ones.
UNREADY_MARKS = (
    "has no available versions",
    "is not healthy",
    "is not ready",
    "unavailable",
    "unloading",
    "shutting down",
)
UNKNOWN_MARKS = ("unknown model", "failed to poll", "is not found")


@dataclass(eq=False)
class ShoalError(Exception):
    """A request that failed. ``message`` is fit for its sender; ``detail`` is for the log only."""

    message: str
    status: int = 500
    code: str | None = "server_error"
    param: str | None = None
    type: str = ""
    retry_after_ms: int | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.type = self.type or error_type(self.status)

    def __str__(self) -> str:
        return self.message

    @classmethod
    def from_json(cls, text: str | bytes) -> "ShoalError":
        """Read the backend's ``error`` tensor; anything unreadable becomes a plain 500."""
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, TypeError, AttributeError):
            return cls("The model server reported an error.", detail=str(text)[:500])

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ShoalError":
        """The same, decoded. Raises ValueError and the like where it is malformed."""
        retry_after_ms = values.get("retry_after_ms")
        status = int(values.get("status") or 500)
        return cls(
            message=str(values["message"]),
            status=status if 400 <= status <= 599 else 500,
            code=_text_or_none(values.get("code")),
            param=_text_or_none(values.get("param")),
            type=str(values.get("type") or ""),
            retry_after_ms=None if retry_after_ms is None else int(retry_after_ms),
        )


def error_type(status: int) -> str:
    """OpenAI's coarse error class of an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    if status == 404:
        return "not_found_error"
    if status < 500:
        return "invalid_request_error"
    return "service_unavailable_error" if status == 503 else "server_error"


def unavailable(message: str, detail: str | None = None, retry_after_ms: int = 1000) -> ShoalError:
    """The server cannot serve now, and asking again later may help."""
    return ShoalError(
        message, 503, "service_unavailable", retry_after_ms=retry_after_ms, detail=detail
    )


def draining() -> ShoalError:
    """The server takes nothing new any more."""
    message = "The server is shutting down. Retry, or use another server."
    return ShoalError(message, 503, "draining", retry_after_ms=5000)


def model_not_found(model: str) -> ShoalError:
    return ShoalError(
        f"The model {model[:128]!r} does not exist. Ask GET /v1/models for those that do.",
        404,
        "model_not_found",
        "model",
    )


def from_tritonserver(text: str, model: str) -> ShoalError:
    """Classify an error that tritonserver itself wrote; on a stream only its text arrives."""
    lowered = text.lower()
    if any(mark in lowered for mark in UNREADY_MARKS):
        return unavailable(f"The model {model[:128]!r} is not ready.", detail=text)
    if any(mark in lowered for mark in UNKNOWN_MARKS):
        error = model_not_found(model)
        error.detail = text
        return error
    return ShoalError("The model server could not run the request.", 500, detail=text)


def from_grpc(code_name: str, text: str) -> ShoalError:
    """Classify a failed gRPC call by the name of its status code."""
    if code_name == "UNAVAILABLE":
        return unavailable("The model server cannot be reached.", detail=text)
    if code_name == "CANCELLED":
        return unavailable("The model server cancelled the request.", detail=text)
    if code_name == "DEADLINE_EXCEEDED":
        return ShoalError("The request took longer than its timeout.", 504, "timeout", detail=text)
    if code_name == "RESOURCE_EXHAUSTED":
        return ShoalError("The request is too large.", 413, "request_too_large", detail=text)
    return ShoalError("The model server failed.", 502, "bad_gateway", detail=f"{code_name}: {text}")


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)
