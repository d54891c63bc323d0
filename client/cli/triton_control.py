"""The few calls on tritonserver's control side that the supervisor makes."""

import asyncio
import re

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from shoal.client.triton_stream import control_headers

LIVE_POLL_S = 0.2
CALL_TIMEOUT_S = 5.0
# tritonserver wraps what a backend raised in words of its own and the place in the code.
_STATE_PREFIX = re.compile(
    r"^.*?is at UNAVAILABLE state: (?:[A-Z][\w ]*: )?(?:\w+Exception: )?", re.S
)
_PLACE = re.compile(r"\n+At:\n.*", re.S)


class ModelLoadError(Exception):
    """A model that cannot be loaded; the message is the backend's reason."""


class TritonControl:
    """Loads and unloads models over gRPC. One per event loop; close it at the end."""

    def __init__(self, url: str, control_key: str | None = None) -> None:
        self._client = InferenceServerClient(url)
        self._headers = control_headers(control_key)

    async def is_live(self) -> bool:
        """Whether the server answers at all."""
        try:
            return bool(await self._client.is_server_live(client_timeout=CALL_TIMEOUT_S))
        except InferenceServerException:
            return False

    async def wait_live(self) -> None:
        """Wait until the server answers."""
        while not await self.is_live():
            await asyncio.sleep(LIVE_POLL_S)

    async def load(self, model: str) -> None:
        """Load a model; takes as long as its worker needs. Raises ModelLoadError."""
        try:
            await self._client.load_model(model, headers=self._headers)
        except InferenceServerException as error:
            raise ModelLoadError(load_reason(model, str(error))) from error

    async def unload(self, model: str) -> None:
        """Unload a model, whether its process lives or not."""
        try:
            await self._client.unload_model(model, headers=self._headers)
        except InferenceServerException as error:
            raise ModelLoadError(load_reason(model, str(error))) from error

    async def was_unloaded(self, model: str) -> bool | None:
        """Whether somebody had it unloaded, or is about to, or is loading it again, or nobody has
        loaded it since the server started. Of a model whose process has died, and of one that could
        not be loaded, the server says otherwise. None: it does not answer."""
        try:
            index = await self._client.get_model_repository_index(
                headers=self._headers, client_timeout=CALL_TIMEOUT_S
            )
        except InferenceServerException:
            return None
        versions = [entry for entry in index.models if entry.name == model]
        if any(entry.state == "READY" for entry in versions):
            return False
        return any(
            entry.state in ("", "UNLOADING", "LOADING") or entry.reason == "unloaded"
            for entry in versions
        )

    async def close(self) -> None:
        await self._client.close()


def load_reason(model: str, text: str) -> str:
    """What the backend said, without what tritonserver and gRPC put around it."""
    if "failed to poll from model repository" in text:
        return f"the model repository has no folder {model!r} with a config.pbtxt and a version"
    reason = _PLACE.sub("", _STATE_PREFIX.sub("", text))
    return reason.removeprefix(f"model {model!r}: ").strip().rstrip(";").strip() or text.strip()
