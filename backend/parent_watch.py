"""Ends a process whose parent has died, though it may wait for that parent for ever."""

import os
import threading
from collections.abc import Callable

POLL_S = 1.0


class ParentWatch:
    """Calls ``on_death``, once, from a thread of its own, when the parent process is gone.

    A dead parent's children get another one, so a change of the parent's id is the sign. Linux
    could send a signal, but does so when the *thread* that forked ends, and the server's does.
    """

    def __init__(self, on_death: Callable[[], None], poll_s: float = POLL_S) -> None:
        self._on_death = on_death
        self._poll_s = poll_s
        self._parent_pid = os.getppid()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-parent-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._poll_s):
            if os.getppid() != self._parent_pid:
                self._on_death()
                return
