"""Prefix blocks in files: written and read by a thread, so that a slow disk never stalls a step.

A file is named by the salted digest of the path whose KV it holds. It is private to the user,
written aside and moved into place, and believed only when everything in it is as expected: the
model's fingerprint, the digest, the block's tokens, the length and a checksum of the whole.
"""

import contextlib
import errno
import fcntl
import logging
import os
import queue
import re
import stat
import struct
import threading
from array import array
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from shoal.backend.engine_config import ConfigError

MAGIC = b"SHOALKV1"
MAX_QUEUED_STORES = 64  # blocks in memory on their way to the disk; more are not kept
_HEADER = struct.Struct("<8s32s32sIQ")  # magic, fingerprint, digest, number of tokens, payload size
_CHECKSUM_BYTES = 32
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}\.blocks")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskOutcome:
    """One order is done. ``payload`` is there when a block was loaded."""

    digest: bytes
    loaded: bool  # else stored
    ok: bool
    payload: bytearray | None = None
    disk_full: bool = False  # why a block was not stored


@dataclass(frozen=True, slots=True)
class _Order:
    # Loads first: a request waits for them. Then removals: they make room for stores.
    kind: int
    digest: bytes = b""
    token_ids: tuple[int, ...] = ()
    payload: bytearray = field(default_factory=bytearray)


_LOAD, _REMOVE, _STORE, _LEAVE = range(4)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskInUse(Exception):
    """Another worker has the folder."""


class KVDisk:
    """Orders from the engine thread; one thread of its own carries them out.

    Raises ConfigError for a folder that cannot be used, DiskInUse for one that is used already.
    """

    def __init__(self, folder: Path, fingerprint: bytes, payload_bytes: int) -> None:
        self._fingerprint = fingerprint
        self._payload_bytes = payload_bytes
        _make_private(folder)
        self._lock = _lock(folder / "lock")
        self._folder = folder / f"{fingerprint.hex()[:32]}.blocks"
        _remove_others(folder, self._folder)
        _make_private(self._folder)
        self._orders: queue.PriorityQueue[tuple[int, int, _Order]] = queue.PriorityQueue()
        self._outcomes: queue.SimpleQueue[DiskOutcome] = queue.SimpleQueue()
        self._num_orders = 0
        self._num_stores = 0  # queued; counted down by the thread
        self._count_lock = threading.Lock()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="shoal-kv-disk", daemon=True)
        self._thread.start()

    def digests(self) -> list[bytes]:
        """Of the blocks that lie here from before, the one written first first."""
        found = []
        for entry in os.scandir(self._folder):
            if _FILE_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
            else:
                _unlink(Path(entry.path))  # what a write that was cut short left behind
        return [bytes.fromhex(name[:64]) for _, name in sorted(found)]

    def keep_newest(self, most: int) -> list[bytes]:
        """As ``digests``, and no more than ``most`` blocks: the ones written first go."""
        digests = self.digests()
        num_over = max(0, len(digests) - most)
        for digest in digests[:num_over]:
            self.remove(digest)
        return digests[num_over:]

    @property
    def takes_more(self) -> bool:
        """Whether a store would be taken now."""
        return self._num_stores < MAX_QUEUED_STORES

    def store(self, digest: bytes, token_ids: tuple[int, ...], payload: bytearray) -> bool:
        """Write a block some time soon; False when too many are waiting already."""
        with self._count_lock:
            if self._num_stores >= MAX_QUEUED_STORES:
                return False
            self._num_stores += 1
        self._put(_Order(_STORE, digest, token_ids, payload))
        return True

    def load(self, digest: bytes, token_ids: tuple[int, ...]) -> None:
        """Read a block; its outcome comes always."""
        self._put(_Order(_LOAD, digest, token_ids))

    def remove(self, digest: bytes) -> None:
        self._put(_Order(_REMOVE, digest))

    def take_outcomes(self, wait_s: float = 0.0) -> list[DiskOutcome]:
        """What was done since the last time, waiting for the first at most ``wait_s``."""
        outcomes = []
        with contextlib.suppress(queue.Empty):
            if wait_s:
                outcomes.append(self._outcomes.get(timeout=wait_s))
            while True:
                outcomes.append(self._outcomes.get_nowait())
        return outcomes

    def close(self) -> None:
        """Carry out what was ordered, and end the thread. Once is enough."""
        if self._thread.is_alive():
            self._put(_Order(_LEAVE))
            self._thread.join()
            os.close(self._lock)

    def file_bytes(self, block_size: int) -> int:
        """Size of a block's file."""
        return _HEADER.size + 8 * block_size + self._payload_bytes + _CHECKSUM_BYTES

    def path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.kv"

    def _put(self, order: _Order) -> None:
        self._num_orders += 1
        self._orders.put((order.kind, self._num_orders, order))

    def _run(self) -> None:
        while True:
            order = self._orders.get()[2]
            if order.kind == _LEAVE:
                return
            if order.kind == _LOAD:
                payload = self._read(order)
                outcome = DiskOutcome(order.digest, True, payload is not None, payload)
                self._outcomes.put(outcome)
            elif order.kind == _STORE:
                self._outcomes.put(self._store(order))
                with self._count_lock:
                    self._num_stores -= 1
            else:
                _unlink(self.path(order.digest))

    def _store(self, order: _Order) -> DiskOutcome:
        try:
            self._write(order)
        except OSError as error:
            _unlink(self._aside(order))
            self._warn("a prefix block could not be written: %s", error)
            return DiskOutcome(order.digest, False, False, disk_full=error.errno in _FULL)
        return DiskOutcome(order.digest, False, True)

    def _aside(self, order: _Order) -> Path:
        """Where a file is written before it gets its name."""
        return self.path(order.digest).with_suffix(".part")

    def _write(self, order: _Order) -> None:
        head = self._head(order)
        checksum = sha256(head)
        checksum.update(order.payload)
        aside = self._aside(order)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(aside, flags, 0o600), "wb") as file:
            file.write(head)
            file.write(order.payload)
            file.write(checksum.digest())
        os.replace(aside, self.path(order.digest))

    def _read(self, order: _Order) -> bytearray | None:
        """The payload of a file that is wholly as expected; any other is removed."""
        path = self.path(order.digest)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                head = self._head(order)
                size = len(head) + self._payload_bytes + _CHECKSUM_BYTES
                is_plausible = stat.S_ISREG(status.st_mode) and status.st_size == size
                contents = file.read(size) if is_plausible else b""
        except OSError as error:
            self._warn("a prefix block could not be read: %s", error)
            contents = b""
        body = memoryview(contents)[:-_CHECKSUM_BYTES]
        if (
            len(contents) == 0
            or body[: len(head)] != head
            or sha256(body).digest() != contents[-_CHECKSUM_BYTES:]
        ):
            _unlink(path)
            return None
        return bytearray(body[len(head) :])

    def _head(self, order: _Order) -> bytes:
        tokens = array("q", order.token_ids).tobytes()
        size = self._payload_bytes
        assert order.kind == _LOAD or len(order.payload) == size
        count = len(order.token_ids)
        return _HEADER.pack(MAGIC, self._fingerprint, order.digest, count, size) + tokens

    def _warn(self, message: str, error: OSError) -> None:
        if not self._warned:
            logger.warning(message + " (said once)", error.strerror)
            self._warned = True


def _make_private(folder: Path) -> None:
    """A folder of mode 0700 that is ours. Raises ConfigError where it is not."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"kv_disk_dir cannot be made: {error.strerror}.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            "kv_disk_dir must be a folder of the server's user that nobody else may enter: "
            "name a new folder, or set its mode to 0700."
        )


def _lock(path: Path) -> int:
    """A lock file of this process alone; the system lets go of it at our end."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"kv_disk_dir cannot be written: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise DiskInUse from None
    return file


def _remove_others(folder: Path, kept: Path) -> None:
    """Blocks of another model, dtype or layout can never be of use again."""
    for entry in folder.iterdir():
        if entry != kept and _FOLDER_NAME.fullmatch(entry.name) and not entry.is_symlink():
            for file in entry.iterdir():
                _unlink(file)
            with contextlib.suppress(OSError):
                entry.rmdir()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
