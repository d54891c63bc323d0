"""How the SDK reaches a server: Triton's gRPC, or the OpenAI endpoint's HTTP."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.client.errors import ShoalError
from shoal.client.types import Delta, ModelInfo

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class AnswerStream(Protocol):
    """The deltas of one running request; raises ShoalError where it fails."""

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        ...


class Transport(Protocol):
    """One server. Belongs to the event loop in which it was made."""

    def generate(
        self,
        model: str,
        version: str,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        stream: bool,
        timeout_s: float | None,
    ) -> AnswerStream: ...

    async def models(self) -> list[ModelInfo]: ...

    async def is_ready(self, model: str) -> bool: ...

    async def close(self) -> None: ...


def make_transport(url: str, api_key: str | None, ca_file: Path | None) -> Transport:
    """HTTP for ``http://`` and ``https://``, else gRPC (``host:port`` or ``grpc://host:port``).

    Each imports what it needs only now.
    """
    if url.startswith(("http://", "https://")):
        from shoal.client.http_transport import HttpTransport

        return HttpTransport(url, api_key, ca_file)
    if "://" in url and not url.startswith("grpc://"):
        raise ShoalError("url must begin with http://, https:// or grpc://.", 400, param="url")
    if api_key is not None or ca_file is not None:
        raise ShoalError(
            "api_key and ca_file are for the OpenAI endpoint: give its URL, such as "
            "http://127.0.0.1:9000. Triton's gRPC port asks for no key.",
            400,
            param="api_key",
        )
    from shoal.client.grpc_transport import GrpcTransport

    return GrpcTransport(url.removeprefix("grpc://"))


def check_prompt(prompt: Prompt) -> None:
    """Raise ShoalError (400) for what is no text, no list, or empty."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence) or not prompt:
        raise ShoalError("prompt must be text, token ids or messages, and not empty.", 400)


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
