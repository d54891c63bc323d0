"""The one error type that a client may see, from whatever part of the server it comes."""

from dataclasses import dataclass


@dataclass(eq=False)
class RequestError(ValueError):
    """A request that cannot be served, in terms its sender understands.

    ``message`` names what was wrong, the allowed values and what to do. It never holds a path, a
    class name or an echo of long input. ``status`` is the HTTP status the OpenAI shim answers with.
    """

    message: str
    param: str | None = None
    code: str = "invalid_value"
    status: int = 400
    retry_after_ms: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        """OpenAI's coarse error class, derived from the status."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 404:
            return "not_found_error"
        if self.status < 500:
            return "invalid_request_error"
        return "service_unavailable_error" if self.status == 503 else "server_error"

    def to_dict(self) -> dict[str, str | int | None]:
        """The wire form, the same in the ``error`` tensor and in the shim's JSON body."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            "status": self.status,
            "retry_after_ms": self.retry_after_ms,
        }


def context_exceeded(max_model_len: int, what: str, param: str | None = None) -> RequestError:
    """``what`` does not fit. Clients tell this case by the code or by OpenAI's words for it."""
    message = f"This model's maximum context length is {max_model_len} tokens. {what}"
    return RequestError(message, param=param, code="context_length_exceeded")
