"""Responses that a later request may go on from, kept where several shim processes find them."""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from shoal.client.openai.response_store import StoredResponse, response_not_found

BUSY_TIMEOUT_S = 2.0

logger = logging.getLogger("shoal.openai")

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    id TEXT UNIQUE NOT NULL,
    owner TEXT NOT NULL,
    body BLOB NOT NULL,
    messages BLOB NOT NULL,
    num_bytes INTEGER NOT NULL,
    stored_at REAL NOT NULL
)
"""


class SharedResponseStore:
    """As ResponseStore, in an SQLite file that all processes of one ``shoal serve`` open.

    The file is a cache: it is not made safe against the machine's sudden end, only against that of
    a process. Belongs to one event loop in each process.
    """

    def __init__(
        self,
        path: Path,
        max_count: int,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        # Made before the event loop, which need not run in this thread.
        self._db = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("PRAGMA secure_delete = OFF")
        self._db.execute(SCHEMA)

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM responses").fetchone()[0])

    @property
    def num_bytes(self) -> int:
        total = self._db.execute("SELECT coalesce(sum(num_bytes), 0) FROM responses").fetchone()
        return int(total[0])

    def put(
        self, response_id: str, body: bytes, messages: list[dict[str, Any]], owner: str
    ) -> None:
        """Keep a response, unless it alone is more than the store may hold."""
        encoded = orjson.dumps(messages)
        num_bytes = len(body) + len(encoded)
        if num_bytes > self._max_bytes:
            return
        row = (response_id, owner, body, encoded, num_bytes, self._clock())
        try:
            self._put(row)
        except sqlite3.Error:  # the answer itself is whole
            logger.exception("a response could not be stored")

    def _put(self, row: tuple[Any, ...]) -> None:
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO responses (id, owner, body, messages, num_bytes, stored_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                row,
            )
            self._expire()
            while len(self) > self._max_count or self.num_bytes > self._max_bytes:
                self._db.execute(
                    "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses)"
                )

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ShoalError (404) for what is not, or no longer, there, or another's."""
        row = self._db.execute(
            "SELECT body, messages, num_bytes, stored_at FROM responses"
            " WHERE id = ? AND owner = ? AND stored_at >= ?",
            (response_id, owner, self._clock() - self._max_age_s),
        ).fetchone()
        if row is None:
            raise response_not_found(response_id, self._max_age_s, param)
        body, messages, num_bytes, stored_at = row
        return StoredResponse(body, tuple(orjson.loads(messages)), owner, num_bytes, stored_at)

    def delete(self, response_id: str, owner: str) -> None:
        """Raises ShoalError (404) as ``get`` does."""
        self.get(response_id, owner)
        self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def close(self) -> None:
        self._db.close()

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age_s
        self._db.execute("DELETE FROM responses WHERE stored_at < ?", (oldest,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, and no other process writes meanwhile."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
