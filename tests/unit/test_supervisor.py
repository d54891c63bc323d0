"""The supervisor over small scripts that stand for tritonserver and the shim."""

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from process_waits import ended, gone, is_alive, until

from shoal.client.cli.console import Console
from shoal.client.cli.managed_process import Backoff, ProcessSpec
from shoal.client.cli.supervisor import ServePlan, Supervisor, exit_text
from shoal.client.cli.triton_control import ModelLoadError

# Says its pid, then ends on SIGTERM, leaving its name in the order of ending.
OBEDIENT = """
import os, pathlib, signal, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def end(*_):
    with open(folder / "ended", "a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open(folder / (name + ".pids"), "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(0.05)
"""
STUBBORN = OBEDIENT.replace(
    "signal.signal(signal.SIGTERM, end)", "signal.signal(15, signal.SIG_IGN)"
)
FAILING = "print('no such option: --frobnicate'); raise SystemExit(3)"


@pytest.fixture(autouse=True)
def patient_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its children, however slow the machine is."""
    for name in ("SHIM_READY_TIMEOUT_S", "IDLE_PATIENCE_S", "UNLOAD_TIMEOUT_S"):
        monkeypatch.setattr(f"shoal.client.cli.supervisor.{name}", 3600.0)


@dataclass
class FakeControl:
    """A tritonserver's control side; ``broken`` maps a model to why it cannot load."""

    calls: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    unload_hangs: bool = False
    unloaded: set[str] = field(default_factory=set)
    is_silent: bool = False  # as one that is dying

    @property
    def changes(self) -> list[str]:
        """The calls that are no questions."""
        return [call for call in self.calls if "?" not in call]

    async def wait_live(self) -> None:
        self.calls.append("live")

    async def load(self, model: str) -> None:
        self.calls.append(f"load {model}")
        if model in self.broken:
            raise ModelLoadError(self.broken[model])
        self.unloaded.discard(model)

    async def was_unloaded(self, model: str) -> bool | None:
        self.calls.append(f"unloaded? {model}")
        return None if self.is_silent else model in self.unloaded

    async def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")
        self.unloaded.add(model)
        if self.unload_hangs:
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.calls.append("close")


@dataclass
class FakeMonitor:
    """A heartbeat that is as old as the test says."""

    model: str
    age_s: float = 0.0
    is_ready: bool = True
    num_live: int = 0

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


class Stage:
    """A supervisor with fakes around it, and what happened."""

    def __init__(
        self, folder: Path, server: str = OBEDIENT, shim: str = OBEDIENT, num_more_shims: int = 0
    ) -> None:
        self.folder = folder
        self.control = FakeControl()
        self.monitor = FakeMonitor("m")
        self.output = io.StringIO()
        self.ready = asyncio.Event()
        self.killed_stubs: list[str] = []
        self.servers_tidied = 0
        self.supervisor = Supervisor(
            ServePlan(
                server=self.spec("server", server),
                shims=[
                    self.spec("shim", shim),
                    *(self.spec(f"shim-{i}", shim) for i in range(num_more_shims)),
                ],
                models=["m"],
                drain_timeout_s=3600.0,
                control=lambda: self.control,
                monitor=lambda _: self.monitor,
                shim_is_ready=self.shim_is_ready,
                on_ready=self.ready.set,
                after_server=self.tidy,
                kill_stub=lambda _, name: self.killed_stubs.append(name),
            ),
            Console(stream=self.output),
            backoff=lambda: Backoff(first_s=0.01, longest_s=0.1),
            revive_after_s=1.0,
        )

    def spec(self, name: str, code: str) -> ProcessSpec:
        command = [sys.executable, "-I", "-S", "-c", code, str(self.folder), name]
        return ProcessSpec(name, command, os.environ, self.folder / f"{name}.log")

    async def shim_is_ready(self) -> bool:
        return len(self.pids("shim")) > 0

    def tidy(self) -> None:
        self.servers_tidied += 1

    def pids(self, name: str) -> list[int]:
        file = self.folder / f"{name}.pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[int]"]:
        """A supervisor that is ready and has both children."""
        task = asyncio.create_task(self.supervisor.run())
        try:
            await until(self.ready.is_set)
            await until(lambda: bool(self.pids("server") and self.pids("shim")))
            yield task
        finally:
            self.supervisor.request_stop()
            self.supervisor.request_stop()
            await ended(task)


async def test_drains_the_shim_first_and_ends_with_success(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.running() as task:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ended(task) == 0
    assert (tmp_path / "ended").read_text().split() == ["shim", "server"]
    assert stage.control.changes == ["live", "load m", "close"]
    assert stage.servers_tidied == 1


async def test_second_signal_kills_what_does_not_obey(tmp_path: Path) -> None:
    stage = Stage(tmp_path, server=STUBBORN, shim=STUBBORN)
    async with stage.running() as task:
        stage.supervisor.request_stop()
        stage.supervisor.request_stop()
        assert await ended(task) == 1
    await gone(*stage.pids("server"), *stage.pids("shim"))


async def test_model_that_cannot_load_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.control.broken["m"] = "weights: there is no file /x.gguf."
    assert await ended(stage.supervisor.run()) == 1
    assert "Model m cannot be loaded: weights: there is no file /x.gguf." in stage.output.getvalue()
    await gone(*stage.pids("server"), *stage.pids("shim"))


@pytest.mark.parametrize("name", ["server", "shim"])
async def test_process_that_ends_while_starting_shows_its_last_lines(
    tmp_path: Path, name: str
) -> None:
    stage = Stage(tmp_path, **{name: FAILING})
    stage.monitor.is_ready = False
    if name == "server":
        stage.control.wait_live = asyncio.Event().wait  # type: ignore[assignment]
    assert await ended(stage.supervisor.run()) == 1
    output = stage.output.getvalue()
    assert f"{name} ended while starting (exit status 3)" in output
    assert "no such option: --frobnicate" in output


async def test_dead_server_is_started_again_and_its_models_loaded(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.running():
        os.kill(stage.pids("server")[0], signal.SIGKILL)
        await until(lambda: stage.control.calls.count("load m") == 2)
        await until(lambda: len(stage.pids("server")) == 2)
        assert len(stage.pids("shim")) == 1
    assert "server ended (killed by SIGKILL)" in stage.output.getvalue()


async def test_dead_shim_is_started_again_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.running():
        os.kill(stage.pids("shim")[0], signal.SIGKILL)
        await until(lambda: len(stage.pids("shim")) == 2)
        assert len(stage.pids("server")) == 1
        assert stage.control.calls.count("load m") == 1


async def test_one_dead_shim_of_several_is_started_again_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_more_shims=2)
    async with stage.running():
        names = ["shim", "shim-0", "shim-1"]
        await until(lambda: all(stage.pids(name) for name in names))
        os.kill(stage.pids("shim-0")[0], signal.SIGKILL)
        await until(lambda: len(stage.pids("shim-0")) == 2)
        assert [len(stage.pids(name)) for name in names] == [1, 2, 1]
        assert len(stage.pids("server")) == 1
    await gone(*(pid for name in names for pid in stage.pids(name)))


async def test_lost_heartbeat_kills_the_stub_and_loads_the_model_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.running():
        stage.monitor.age_s = 1000.0
        await until(lambda: stage.control.calls.count("load m") >= 2)
        stage.monitor.age_s = 0.0
        assert stage.control.changes[:4] == ["live", "load m", "unload m", "load m"]
        assert stage.killed_stubs[0] == "m"
        assert len(stage.pids("server")) == 1


async def test_a_model_that_somebody_unloads_is_left_so(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.running():
        stage.control.unloaded.add("m")
        stage.monitor.age_s = 1000.0
        await until(lambda: stage.control.calls.count("unloaded? m") >= 3)
        assert "unload m" not in stage.control.calls
        assert not stage.killed_stubs
        assert stage.output.getvalue().count("was unloaded") == 1
        stage.control.unloaded.clear()  # loaded again, and its process dies
        await until(lambda: stage.control.calls.count("load m") >= 2)


async def test_a_model_that_somebody_unloaded_stays_so_when_its_server_dies(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def asked_again() -> None:
        asked = stage.control.calls.count("unloaded? m")
        await until(lambda: stage.control.calls.count("unloaded? m") >= asked + 2)

    async with stage.running():
        stage.control.unloaded.add("m")
        stage.monitor.age_s = 1000.0
        await until(lambda: "was unloaded" in stage.output.getvalue())
        stage.control.is_silent = True
        await asked_again()
        os.kill(stage.pids("server")[0], signal.SIGKILL)
        await until(lambda: len(stage.pids("server")) == 2)
        stage.control.is_silent = False
        await asked_again()
        assert stage.control.calls.count("load m") == 1
        stage.control.unloaded.clear()  # somebody loads it
        stage.monitor.age_s = 0.0
        await until(lambda: not stage.supervisor._left_unloaded)
        os.kill(stage.pids("server")[1], signal.SIGKILL)
        await until(lambda: stage.control.calls.count("load m") == 2)


async def test_an_unload_is_noticed_while_the_model_still_beats(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.running():
        stage.control.unloaded.add("m")
        await until(lambda: "was unloaded" in stage.output.getvalue())
        stage.control.is_silent = True
        os.kill(stage.pids("server")[0], signal.SIGKILL)
        await until(lambda: len(stage.pids("server")) == 2)
        stage.control.is_silent = False
        asked = stage.control.calls.count("unloaded? m")
        await until(lambda: stage.control.calls.count("unloaded? m") >= asked + 2)
        assert stage.control.calls.count("load m") == 1
        assert not stage.killed_stubs


async def test_idle_server_is_not_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.client.cli.supervisor.IDLE_PATIENCE_S", 0.2)
    stage = Stage(tmp_path, server=STUBBORN)
    async with stage.running() as task:
        stage.supervisor.request_stop()
        assert await ended(task) == 0
    await gone(*stage.pids("server"))


async def test_server_with_open_requests_has_the_whole_drain_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.client.cli.supervisor.IDLE_PATIENCE_S", 0.2)
    stage = Stage(tmp_path, server=STUBBORN)
    async with stage.running() as task:
        stage.monitor.num_live = 1
        stage.supervisor.request_stop()
        await until(lambda: (tmp_path / "ended").exists())  # the shim's
        await asyncio.sleep(1.0)
        assert not task.done()
        assert is_alive(stage.pids("server")[0])


async def test_model_that_fails_to_come_back_is_tried_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.running() as task:
        stage.control.broken["m"] = "out of memory"
        stage.monitor.age_s = 1000.0
        await until(lambda: stage.control.calls.count("load m") >= 3)
        assert not task.done()
        assert len(stage.pids("server")) == 1


async def test_server_that_hangs_while_unloading_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.client.cli.supervisor.UNLOAD_TIMEOUT_S", 0.1)
    stage = Stage(tmp_path)
    async with stage.running():
        stage.control.unload_hangs = True
        stage.monitor.age_s = 1000.0
        await until(lambda: len(stage.pids("server")) == 2)
        stage.control.unload_hangs = False
        stage.monitor.age_s = 0.0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (137, "killed by SIGKILL"),
        (-9, "killed by SIGKILL"),
        (255, "exit status 255"),
    ],
)
def test_exit_text(code: int, text: str) -> None:
    assert exit_text(code) == text
