"""Children of the supervisor: whatever ends, what they started ends too."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from process_waits import ended, gone, is_alive, until

from shoal.client.cli.managed_process import Backoff, ManagedProcess, ProcessSpec

# Starts a child that leaves the session, so that only its ancestry tells where it came from.
PARENT = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
if len(sys.argv) > 2:
    sys.exit(7)
while True:
    time.sleep(1)
"""


def parent_spec(folder: Path, *arguments: str) -> ProcessSpec:
    command = [sys.executable, "-I", "-S", "-c", PARENT, str(folder / "pids"), *arguments]
    return ProcessSpec("parent", command, os.environ, folder / "log")


async def read_pids(file: Path) -> list[int]:
    await until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(word) for word in file.read_text().split()]


async def test_orphans_of_a_process_that_ended_are_killed(tmp_path: Path) -> None:
    process = ManagedProcess(parent_spec(tmp_path, "end"), lambda *_: None)
    await process.start()
    assert await ended(process.wait()) == 7
    await gone(*await read_pids(tmp_path / "pids"))


async def test_stubborn_process_is_killed_with_all_below_it(tmp_path: Path) -> None:
    process = ManagedProcess(parent_spec(tmp_path), lambda *_: None)
    await process.start()
    pids = await read_pids(tmp_path / "pids")
    assert all(is_alive(pid) for pid in pids)
    assert await process.stop(patience_s=0.1) is False
    assert not any(is_alive(pid) for pid in pids)


async def test_death_of_the_guard_ends_the_process(tmp_path: Path) -> None:
    process = ManagedProcess(parent_spec(tmp_path), lambda *_: None)
    await process.start()
    parent, child = await read_pids(tmp_path / "pids")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert await ended(process.wait()) == -signal.SIGKILL
    await gone(parent)
    os.kill(child, signal.SIGKILL)  # it left the session: nobody is left who knows of it


SUPERVISE = """
import asyncio, os, pathlib, sys
from shoal.client.cli.managed_process import ManagedProcess, ProcessSpec
async def main():
    command = [sys.executable, "-I", "-S", "-c", sys.argv[1], sys.argv[2]]
    spec = ProcessSpec("parent", command, os.environ, pathlib.Path(sys.argv[2] + ".log"))
    await ManagedProcess(spec, print).start()
    await asyncio.sleep(1000)
asyncio.run(main())
"""


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUPERVISE, PARENT, str(tmp_path / "pids"))
    )
    pids = await read_pids(tmp_path / "pids")
    supervisor.kill()
    await supervisor.wait()
    await gone(*pids)


async def test_missing_program_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    spec = ProcessSpec("x", [str(tmp_path / "none")], os.environ, tmp_path / "log")
    process = ManagedProcess(spec, lambda _, line: lines.append(line))
    await process.start()
    assert await ended(process.wait()) == 127
    assert lines == [f"cannot run {tmp_path / 'none'}: No such file or directory"]


async def test_output_is_kept_in_the_file_and_the_tail(tmp_path: Path) -> None:
    code = "for number in range(100): print('line', number)"
    command = [sys.executable, "-I", "-S", "-c", code]
    for _ in range(2):
        process = ManagedProcess(
            ProcessSpec("x", command, os.environ, tmp_path / "log"), lambda *_: None
        )
        await process.start()
        assert await ended(process.wait()) == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 100
    assert len((tmp_path / "log.1").read_text().splitlines()) == 100
    assert process.tail[-1] == "line 99"


def test_backoff_doubles_up_to_its_limit_and_starts_over_after_a_good_run() -> None:
    backoff = Backoff(first_s=1, longest_s=5, good_run_s=60)
    assert [backoff.after_run_of(0) for _ in range(4)] == [1, 2, 4, 5]
    assert backoff.after_run_of(61) == 1
    assert backoff.after_run_of(0) == 2
