"""The private folder of one running server: sockets, logs, the backend folder."""

import fcntl
import os
import shutil
import stat
from pathlib import Path

from shoal.backend.engine_config import ConfigError

# A Unix socket path holds at most 107 bytes; what is put below the run folder needs the rest.
MAX_PATH_BYTES = 60


class RunDir:
    """Owned by one supervisor at a time, for as long as the object lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.backends = path / "backends"
        self.empty = path / "empty"
        self._lock: int | None = None

    def claim(self) -> None:
        """Create it for this user only and lock it. Raises ConfigError if that cannot be."""
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            raise ConfigError(
                f"run_dir {self.path} is too long for the sockets in it: at most "
                f"{MAX_PATH_BYTES} bytes. Set --run-dir to a shorter one."
            )
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._check_private()
            self.logs.mkdir(mode=0o700, exist_ok=True)
            self.empty.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another shoal serve uses the run folder {self.path}. "
                "Stop it, or give this one its own with --run-dir."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"The run folder {self.path} cannot be used ({error.strerror}). Set --run-dir."
            ) from error

    def fresh_shared(self) -> Path:
        """An empty folder for what several processes of this server share."""
        folder = self.path / "shared"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def release(self) -> None:
        """Let another supervisor have it. What is in it stays, for reading the logs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_private(self) -> None:
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                f"The run folder {self.path} belongs to somebody else. Set --run-dir to your own."
            )
        self.path.chmod(0o700)
