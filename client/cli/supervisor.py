"""Starts tritonserver and the OpenAI shim, keeps them running, and takes them down in order.

tritonserver starts without models; they are loaded by request, so that a model that cannot load
gives its own reason. Three things are watched: that each process lives (else it is started again,
waiting longer each time), that each model's heartbeat comes (else its stub is dead or frozen, which
tritonserver does not notice: it is unloaded and loaded again), and that the server answers while
doing so (else it is killed and started again).
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.client.cli.console import Console
from shoal.client.cli.managed_process import Backoff, ManagedProcess, ProcessSpec
from shoal.client.cli.triton_control import ModelLoadError

WATCH_POLL_S = 0.5
REVIVE_AFTER_S = 4.0
UNLOAD_TIMEOUT_S = 30.0
SHIM_READY_TIMEOUT_S = 60.0
SHIM_POLL_S = 0.2
# What a polite stop may take beyond the drain itself: unloading, closing sockets.
STOP_SLACK_S = 10.0
IDLE_PATIENCE_S = 8.0  # what an idle tritonserver may take to unload and end
SHOWN_TAIL_LINES = 15


class StartError(Exception):
    """The first start failed; the message is for the operator."""


class Monitor(Protocol):
    """What the supervisor needs of a HeartbeatMonitor."""

    model: str

    @property
    def age_s(self) -> float: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def num_live(self) -> int: ...

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class Control(Protocol):
    """What the supervisor needs of a TritonControl."""

    async def wait_live(self) -> None: ...

    async def load(self, model: str) -> None: ...

    async def unload(self, model: str) -> None: ...

    async def was_unloaded(self, model: str) -> bool | None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to run, as a whole."""

    server: ProcessSpec
    shims: Sequence[ProcessSpec]
    models: Sequence[str]
    drain_timeout_s: float
    control: Callable[[], Control]  # called inside the event loop
    monitor: Callable[[str], Monitor]
    shim_is_ready: Callable[[], Awaitable[bool]]
    on_ready: Callable[[], None]
    after_server: Callable[[], None]  # tidies up when tritonserver is known to be gone
    kill_stub: Callable[[int, str], None]  # ends a model's stub below this pid, if there is one


class Supervisor:
    """Runs one ServePlan until a signal; ``run`` returns the exit status."""

    def __init__(
        self,
        plan: ServePlan,
        console: Console,
        backoff: Callable[[], Backoff] = Backoff,
        revive_after_s: float = REVIVE_AFTER_S,
    ) -> None:
        self.plan = plan
        self.console = console
        self.server: ManagedProcess | None = None
        self.shims: dict[str, ManagedProcess] = {}  # the latest of each, by name
        self._backoff = backoff
        self._revive_after_s = revive_after_s
        self._unrevived: set[str] = set()  # models that we unloaded and could not load again
        self._left_unloaded: set[str] = set()  # models that somebody else had unloaded
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._shim_was_ready = False
        self._server_was_up = asyncio.Event()
        self._loaded_at: dict[str, float] = {}  # by model, while it should be beating

    async def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP, then drain. A second signal stops at once."""
        self.control = self.plan.control()
        self.monitors = [self.plan.monitor(name) for name in self.plan.models]
        with self._signals():
            serving = asyncio.create_task(self._serve(), name="serve")
            stopping = asyncio.create_task(self._stop_requested.wait(), name="stop")
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            status = 0
            if serving.done():
                status = self._report(serving)
                self._hurry.set()
            stopping.cancel()
            serving.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await self._shut_down()
        return 1 if status == 0 and self._hurry.is_set() else status

    def request_stop(self) -> None:
        """First call: drain. Second call: stop at once."""
        if self._stop_requested.is_set():
            if not self._hurry.is_set():
                self.console.event("Stopping at once.", "warning")
            self._hurry.set()
            return
        self.console.event(
            f"Stopping: open requests have {self.plan.drain_timeout_s:g} s to finish "
            "(signal again to stop at once)."
        )
        self._stop_requested.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.request_stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _report(self, serving: "asyncio.Task[None]") -> int:
        error = serving.exception()
        text = str(error) if isinstance(error, StartError) else f"internal error: {error!r}"
        self.console.event(text, "error")
        return 1

    async def _serve(self) -> None:
        """Never returns; raises StartError if the first start fails."""
        async with _fail_together() as tasks:
            tasks.append(asyncio.create_task(self._keep_server(), name="keep tritonserver"))
            tasks += [
                asyncio.create_task(self._keep_shim(spec), name=f"keep {spec.name}")
                for spec in self.plan.shims
            ]
            tasks.append(asyncio.create_task(self._announce(), name="announce"))
            tasks += [
                asyncio.create_task(self._watch(monitor), name=f"watch {monitor.model}")
                for monitor in self.monitors
            ]

    async def _keep_server(self) -> None:
        backoff = self._backoff()
        while True:
            self.server = ManagedProcess(self.plan.server, self.console.child_line)
            await self.server.start()
            try:
                await self._until_end(self.server, self._bring_up())
            except (ModelLoadError, StartError) as error:
                if not self._server_was_up.is_set():
                    raise StartError(str(error)) from error
                self.console.event(str(error), "error")
            self._loaded_at.clear()
            self.server.kill()
            code = await self.server.wait()
            self.plan.after_server()
            if not self._server_was_up.is_set():
                raise StartError(self._ended_early(self.server, code))
            await self._pause(self.server, code, backoff)

    async def _until_end(self, process: ManagedProcess, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, then wait for the process to end; an early end interrupts the work."""
        ended = asyncio.create_task(process.wait())
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({ended, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            await ended
        finally:
            working.cancel()
            ended.cancel()
            await asyncio.gather(working, ended, return_exceptions=True)

    async def _bring_up(self) -> None:
        """Wait for tritonserver to answer and load every model.

        At the first start a model that cannot load is an error; later it is tried again by the
        watch, so that it does not take the others down. What somebody had unloaded before the
        server ended is not loaded.
        """
        await self.control.wait_live()
        wanted = [name for name in self.plan.models if name not in self._left_unloaded]
        results = await asyncio.gather(
            *(self._load(name) for name in wanted), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures and not self._server_was_up.is_set():
            raise failures[0]
        for failure in failures:
            self.console.event(str(failure), "error")
        for name in self.plan.models:
            # A failed one counts from now as one that does not beat.
            self._loaded_at.setdefault(name, self._now())
        self._server_was_up.set()

    async def _load(self, name: str) -> None:
        self.console.event(f"Loading {name}")
        try:
            await self.control.load(name)
        except ModelLoadError as error:
            raise ModelLoadError(f"Model {name} cannot be loaded: {error}") from error
        self._loaded_at[name] = self._now()
        self._unrevived.discard(name)

    async def _keep_shim(self, spec: ProcessSpec) -> None:
        backoff = self._backoff()
        while True:
            shim = self.shims[spec.name] = ManagedProcess(spec, self.console.child_line)
            await shim.start()
            code = await shim.wait()
            # One that gave up on its own would do so again; one that was killed may start well.
            if not self._shim_was_ready and killed_by(code) is None:
                raise StartError(self._ended_early(shim, code))
            await self._pause(shim, code, backoff)

    async def _pause(self, process: ManagedProcess, code: int, backoff: Backoff) -> None:
        wait_s = backoff.after_run_of(process.uptime_s)
        self.console.event(
            f"{process.spec.name} ended ({exit_text(code)}); starting it again in {wait_s:g} s. "
            f"Its log: {process.spec.log_file}.1",
            "error",
        )
        await asyncio.sleep(wait_s)

    async def _announce(self) -> None:
        """Say that all is ready, once; then do nothing for ever."""
        await self._server_was_up.wait()
        for monitor in self.monitors:
            monitor.start()
        while not all(monitor.is_ready for monitor in self.monitors):
            await asyncio.sleep(SHIM_POLL_S)
        try:
            async with asyncio.timeout(SHIM_READY_TIMEOUT_S):
                while not await self.plan.shim_is_ready():
                    await asyncio.sleep(SHIM_POLL_S)
        except TimeoutError:
            raise StartError(
                f"The OpenAI API did not become ready in {SHIM_READY_TIMEOUT_S:g} s.\n"
                + "\n".join(self._tail(shim) for shim in self.shims.values())
            ) from None
        self._shim_was_ready = True
        self.plan.on_ready()
        await asyncio.Event().wait()

    async def _watch(self, monitor: Monitor) -> None:
        """Bring a model back whose heartbeat has stopped while its server lives."""
        await self._server_was_up.wait()
        backoff = self._backoff()
        last_poll = self._now()
        while True:
            await asyncio.sleep(WATCH_POLL_S)
            now = self._now()
            if now - last_poll > WATCH_POLL_S + 1.0 and monitor.model in self._loaded_at:
                self._loaded_at[monitor.model] = now  # we stood still, not the model
            last_poll = now
            if monitor.model not in self._loaded_at:  # its server is being started
                continue
            # Asked while it still beats too: whatever dies next, an unloaded model is left so.
            is_left = await self._is_left_unloaded(monitor.model)
            last_poll = now = self._now()
            loaded_at = self._loaded_at.get(monitor.model)
            if loaded_at is None or is_left:
                continue
            silent_s = min(monitor.age_s, now - loaded_at)
            if silent_s >= self._revive_after_s:
                await self._revive(monitor.model, silent_s)
                await asyncio.sleep(backoff.after_run_of(now - loaded_at))
                last_poll = self._now()

    async def _is_left_unloaded(self, name: str) -> bool:
        """Whether somebody else had the model unloaded: what it runs goes to its end."""
        unloaded = name not in self._unrevived and await self.control.was_unloaded(name)
        if unloaded is None:  # its server may be dying: what was known of it holds for the next
            return name in self._left_unloaded
        if unloaded and name not in self._left_unloaded:
            self.console.event(f"{name} was unloaded; it stays so until it is loaded again.")
            self._left_unloaded.add(name)
        elif not unloaded and name in self._left_unloaded:  # loaded again: it has yet to beat
            self._left_unloaded.discard(name)
            if name in self._loaded_at:
                self._loaded_at[name] = self._now()
            return True
        return unloaded

    async def _revive(self, name: str, silent_s: float) -> None:
        self.console.event(
            f"No heartbeat of {name} for {silent_s:.1f} s: loading it again.", "error"
        )
        if self.server is not None and self.server.pid is not None:
            # Unloading leaves a frozen stub behind, with its worker and their memory.
            self.plan.kill_stub(self.server.pid, name)
        self._unrevived.add(name)
        try:
            async with asyncio.timeout(UNLOAD_TIMEOUT_S):
                await self.control.unload(name)
            await self._load(name)
            self.console.event(f"{name} is loaded again.")
        except ModelLoadError as error:
            self.console.event(str(error), "error")
            if name in self._loaded_at:
                self._loaded_at[name] = self._now()
        except TimeoutError:
            self.console.event(
                "tritonserver does not answer either: killing and starting it again.", "error"
            )
            self._loaded_at.clear()
            if self.server is not None:
                self.server.kill()

    async def _shut_down(self) -> None:
        """The shim first, so that open requests end while the engine still runs."""
        patience_s = self.plan.drain_timeout_s + STOP_SLACK_S
        await asyncio.gather(*(self._stop(shim, patience_s) for shim in self.shims.values()))
        # tritonserver can wait in vain for requests that it lost count of (a stub's that died, a
        # stream's that was cancelled just as it ended) and for idle connections.
        is_idle = not any(monitor.num_live for monitor in self.monitors)
        for monitor in self.monitors:  # their open streams would hold up tritonserver
            await monitor.stop()
        await self.control.close()
        if self.server is not None:
            await self._stop(self.server, IDLE_PATIENCE_S if is_idle else patience_s)
            self.plan.after_server()

    async def _stop(self, process: ManagedProcess, patience_s: float) -> None:
        polite = await process.stop(patience_s, self._hurry)
        if not polite and not self._hurry.is_set():
            self.console.event(f"{process.spec.name} had to be stopped by force.", "warning")

    def _ended_early(self, process: ManagedProcess, code: int) -> str:
        return (
            f"{process.spec.name} ended while starting ({exit_text(code)}).\n{self._tail(process)}"
        )

    def _tail(self, process: ManagedProcess | None) -> str:
        if process is None:
            return ""
        lines = [f"    {line}" for line in list(process.tail)[-SHOWN_TAIL_LINES:]]
        return "\n".join(["Its last lines:", *lines, f"All of them: {process.spec.log_file}"])

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def killed_by(code: int) -> signal.Signals | None:
    """The signal that ended a process, of its exit code or of the code of a guard above it."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code if code < 0 else code - 128)
    return None


def exit_text(code: int) -> str:
    """``137`` -> ``killed by SIGKILL``."""
    number = killed_by(code)
    return f"exit status {code}" if number is None else f"killed by {number.name}"


@contextlib.asynccontextmanager
async def _fail_together() -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Run the tasks put into the list; the first failure is raised as it is, the rest cancelled.

    A TaskGroup would wrap the one error that matters in a group.
    """
    tasks: list[asyncio.Task[None]] = []
    yield tasks
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
