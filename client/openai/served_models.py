"""Which models the Triton server serves, and the answers that are open on each."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.client import errors
from shoal.client.errors import ShoalError
from shoal.client.heartbeat_monitor import HeartbeatMonitor
from shoal.client.openai.settings import ShimSettings
from shoal.client.triton_stream import GenerationStream, TritonStream

logger = logging.getLogger("shoal.openai")

# States in which the backend queues a request and will serve it, replaying after a worker's death.
ACCEPTING_STATES = ("ready", "stuck", "restarting")


@dataclass(eq=False)
class ServedModel:
    """One model: its heartbeat and the streams that end when the heartbeat is lost."""

    name: str
    monitor: HeartbeatMonitor
    created: int = field(default_factory=lambda: int(time.time()))
    listed: bool = True  # the server's index says it is loaded
    last_listed: float = field(default_factory=time.monotonic)
    streams: set[GenerationStream] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.listed and self.monitor.is_ready

    @property
    def state(self) -> str:
        """The backend's word for it, or "lost" when none was heard lately."""
        if not self.listed:
            return "unloaded"
        if self.monitor.last is None or self.monitor.is_lost:
            return "lost"
        return self.monitor.last.state

    async def check_accepting(self, first_beat_timeout_s: float) -> None:
        """Raise ShoalError (503) unless the backend would take a request now."""
        if self.listed and self.monitor.last is None:
            await self.monitor.wait_first_beat(first_beat_timeout_s)
        if self.state not in ACCEPTING_STATES:
            raise errors.unavailable(f"The model {self.name!r} is not ready ({self.state}).")

    @contextlib.contextmanager
    def tracked(self, stream: GenerationStream) -> Iterator[None]:
        """While inside, a lost heartbeat ends the stream with an error."""
        self.streams.add(stream)
        try:
            yield
        finally:
            self.streams.discard(stream)

    def fail_streams(self, _: HeartbeatMonitor) -> None:
        error = errors.unavailable(f"The model {self.name!r} stopped answering.")
        for stream in list(self.streams):
            stream.fail(error)


class ServedModels:
    """Follows the server's repository index; keeps one heartbeat monitor a model."""

    def __init__(self, triton: TritonStream, settings: ShimSettings) -> None:
        self._triton = triton
        self._settings = settings
        self._models: dict[str, ServedModel] = {}
        self._foreign: set[str] = set()  # loaded models of other backends
        self._refreshed_at = float("-inf")
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for model in self._models.values():
            await model.monitor.stop()

    @property
    def models(self) -> list[ServedModel]:
        return list(self._models.values())

    def listed(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.listed]

    async def find(self, name: str) -> ServedModel:
        """The model of that name. Raises ShoalError 404 when there is none, 503 when unknown."""
        if name not in self._models:
            await self.refresh(max_age_s=self._settings.discovery_interval_s)
        if name not in self._models:
            raise errors.model_not_found(name)
        return self._models[name]

    async def refresh(self, max_age_s: float = 0.0) -> None:
        """Read the index unless that was done lately. Raises ShoalError when it cannot be read."""
        async with self._lock:
            if time.monotonic() - self._refreshed_at < max_age_s:
                return
            index = await self._triton.models()
            await self._apply({entry.name for entry in index if entry.ready})
            self._refreshed_at = time.monotonic()

    async def _follow(self) -> None:
        while True:
            try:
                await self.refresh()
            except ShoalError as error:
                logger.debug("no model index: %s", error.detail or error)
            except Exception:
                logger.exception("the model index could not be applied")
            await asyncio.sleep(self._settings.discovery_interval_s)

    async def _apply(self, loaded: set[str]) -> None:
        self._foreign &= loaded
        for name in sorted(loaded - self._foreign - set(self._models)):
            await self._add(name)
        now = time.monotonic()
        for model in self.models:
            model.listed = model.name in loaded
            if model.listed:
                model.last_listed = now
            elif now - model.last_listed > self._settings.forget_after_s:
                del self._models[model.name]
                await model.monitor.stop()

    async def _add(self, name: str) -> None:
        try:
            if not await self._triton.is_shoal_model(name):
                self._foreign.add(name)
                return
        except ShoalError as error:
            logger.debug("no metadata of %s: %s", name, error.detail or error)
            return
        monitor = HeartbeatMonitor(self._triton, name, lost_after_s=self._settings.lost_after_s)
        model = ServedModel(name, monitor)
        monitor.on_lost.append(model.fail_streams)
        self._models[name] = model
        monitor.start()
