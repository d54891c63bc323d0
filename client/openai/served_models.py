"""Which models the Triton server serves, and the answers that are open on each."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.client import errors
from shoal.client.channel import ModelChannel
from shoal.client.channel_stream import ChannelStream
from shoal.client.errors import ShoalError
from shoal.client.heartbeat_monitor import HeartbeatMonitor
from shoal.client.openai.door import Door
from shoal.client.openai.settings import ShimSettings
from shoal.client.triton_stream import TritonStream

logger = logging.getLogger("shoal.openai")

# States in which the backend queues a request and will serve it, replaying after a worker's death.
ACCEPTING_STATES = ("ready", "stuck", "restarting")
SILENCE_S = 5.0  # of a channel with requests, whose backend says something every second


@dataclass(eq=False)
class ServedModel:
    """One model: its heartbeat and the streams that end when the heartbeat is lost."""

    id: str  # by which a request asks for it: its name, or name@version
    name: str
    version: str  # empty: the server's choice
    monitor: HeartbeatMonitor
    channel: ModelChannel
    created: int = field(default_factory=lambda: int(time.time()))
    listed: bool = True  # the server's index says it is loaded
    last_listed: float = field(default_factory=time.monotonic)
    door: Door = field(init=False)
    streams: set[ChannelStream] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.door = Door(self.monitor.refused)

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
            raise errors.unavailable(f"The model {self.id!r} is not ready ({self.state}).")

    @contextlib.contextmanager
    def tracked(self, stream: ChannelStream) -> Iterator[None]:
        """While inside, a lost heartbeat ends the stream with an error."""
        self.streams.add(stream)
        try:
            yield
        finally:
            self.streams.discard(stream)

    def take_beat(self, monitor: HeartbeatMonitor) -> None:
        self.door.take(monitor.last.queue if monitor.last is not None else None)

    def lose_streams(self, _: HeartbeatMonitor) -> None:
        """Unless it is being unloaded: it takes no new request then, not even for beats, but those
        that it has go to their end."""
        if not self.listed:
            return
        self.channel.reset(errors.unavailable(f"The model {self.id!r} stopped answering."))

    async def stop(self) -> None:
        """Follow it no longer; what still runs is cancelled."""
        await self.monitor.stop()
        await self.channel.close()

    def fail_streams(self, error: ShoalError) -> None:
        """End all running requests; their clients are told why."""
        for stream in list(self.streams):
            stream.fail(error)


class ServedModels:
    """Follows the server's repository index; keeps one heartbeat monitor a model, and one for each
    of its versions where several are loaded or one was asked for by number."""

    def __init__(self, triton: TritonStream, settings: ShimSettings) -> None:
        self._triton = triton
        self._settings = settings
        self._models: dict[str, ServedModel] = {}
        self._leaving: list[ServedModel] = []  # forgotten, with requests that still run
        self._foreign: set[str] = set()  # loaded models of other backends
        self._loaded: set[str] = set()  # ids
        self._shown: set[str] = set()  # those of the loaded ids that are listed
        self._loading: set[str] = set()  # names
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
        for model in (*self._models.values(), *self._leaving):
            await model.stop()

    @property
    def models(self) -> list[ServedModel]:
        return list(self._models.values())

    def listed(self) -> list[ServedModel]:
        """The models, and those versions that a client has to choose from."""
        shown = self._shown
        return [model for model in self._models.values() if model.listed and model.id in shown]

    async def find(self, name: str) -> ServedModel:
        """The model of that name. Raises ShoalError 404 when there is none, 503 when it is still
        being loaded, or that is unknown."""
        if name not in self._models:
            await self.refresh(max_age_s=self._settings.discovery_interval_s)
        if name not in self._models and name in self._loaded:
            await self._add(name)
        if name not in self._models and name in self._loading:
            raise errors.unavailable(f"The model {name[:128]!r} is being loaded.")
        if name not in self._models:
            raise errors.model_not_found(name)
        return self._models[name]

    async def refresh(self, max_age_s: float = 0.0) -> None:
        """Read the index unless that was done lately. Raises ShoalError when it cannot be read."""
        async with self._lock:
            if time.monotonic() - self._refreshed_at < max_age_s:
                return
            index = await self._triton.models()
            self._loading = {entry.name for entry in index if entry.loading}
            versions: dict[str, list[str]] = {}
            for entry in index:
                if entry.ready:
                    versions.setdefault(entry.name, []).append(entry.version)
            await self._apply(versions)
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

    async def _apply(self, versions: dict[str, list[str]]) -> None:
        """``versions``: those that are loaded, of each model."""
        self._foreign &= set(versions)
        shown = set(versions)
        self._loaded = set(versions)
        for name, numbers in versions.items():
            of_version = {f"{name}@{number}" for number in numbers if number}
            self._loaded |= of_version
            if len(numbers) > 1:
                shown |= of_version
        self._shown = shown
        for model_id in sorted(shown - set(self._models)):
            await self._add(model_id)
        now = time.monotonic()
        for model in self.models:
            model.listed = model.id in self._loaded
            if model.listed:
                model.last_listed = now
            elif now - model.last_listed > self._settings.forget_after_s:
                self._leaving.append(self._models.pop(model.id))
                await model.monitor.stop()
        await self._see_to_channels()

    async def _see_to_channels(self) -> None:
        # Counted rather than timed: while this process stood still, nothing was read either.
        num_looks = math.ceil(SILENCE_S / self._settings.discovery_interval_s)
        for model in (*self.models, *self._leaving):
            model.channel.fail_silent(num_looks)
        for model in [model for model in self._leaving if not model.channel.num_open]:
            self._leaving.remove(model)
            await model.stop()

    async def _add(self, model_id: str) -> None:
        name, version = self._split(model_id)
        if name in self._foreign:
            return
        try:
            if not await self._triton.is_shoal_model(name, version):
                self._foreign.add(name)
                return
        except ShoalError as error:
            logger.debug("no metadata of %s: %s", model_id, error.detail or error)
            return
        if model_id in self._models:  # another request was quicker
            return
        monitor = HeartbeatMonitor(
            self._triton, name, version, lost_after_s=self._settings.lost_after_s
        )
        channel = self._triton.channel(name, version)
        model = ServedModel(model_id, name, version, monitor, channel)
        monitor.on_lost.append(model.lose_streams)
        monitor.on_beat.append(model.take_beat)
        self._models[model_id] = model
        monitor.start()

    def fail_streams(self, error: ShoalError) -> None:
        """End all running requests of all models."""
        for model in (*self._models.values(), *self._leaving):
            model.fail_streams(error)

    def _split(self, model_id: str) -> tuple[str, str]:
        """Name and version. A model's own name may hold an @."""
        name, _, version = model_id.rpartition("@")
        return (name, version) if name in self._loaded and version.isdecimal() else (model_id, "")
