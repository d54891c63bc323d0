"""Waiting for processes and other things that happen in their own time."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

POLL_S = 0.02
# Polls, not seconds: on a machine that stands still for a while, the tests stand still with it.
MOST_POLLS = 3000


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(MOST_POLLS):
        if holds():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"it did not come to hold in {MOST_POLLS} polls")


async def ended(work: "Coroutine[Any, Any, int] | asyncio.Task[int]") -> int:
    """What it returns, however long the machine stands still meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await until(task.done)
    finally:
        task.cancel()
    return await task


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state != b"Z"


async def gone(*pids: int) -> None:
    await until(lambda: not any(is_alive(pid) for pid in pids))
