"""Responses that a later request may go on from: kept in memory, bounded in every way."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from shoal.client.errors import ShoalError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``body`` as it was answered; ``messages``: the chat so far, instructions left out."""

    body: bytes
    messages: tuple[dict[str, Any], ...]
    owner: str
    num_bytes: int
    stored_at: float  # monotonic


def response_not_found(response_id: str, max_age_s: float, param: str | None) -> ShoalError:
    return ShoalError(
        f"There is no response {response_id[:64]!r}. Responses are kept for "
        f"{max_age_s:g} s at most, and only with store set to true.",
        404,
        "response_not_found",
        param,
    )


class ResponseStore:
    """Belongs to one process and its event loop. The oldest go first when there are too many."""

    def __init__(
        self,
        max_count: int,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(
        self, response_id: str, body: bytes, messages: list[dict[str, Any]], owner: str
    ) -> None:
        """Keep a response, unless it alone is more than the store may hold."""
        num_bytes = len(body) + len(orjson.dumps(messages))
        if num_bytes > self._max_bytes:
            return
        self._kept[response_id] = StoredResponse(
            body, tuple(messages), owner, num_bytes, self._clock()
        )
        self.num_bytes += num_bytes
        while len(self._kept) > self._max_count or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ShoalError (404) for what is not, or no longer, there, or another's."""
        self._expire()
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise response_not_found(response_id, self._max_age_s, param)
        return found

    def delete(self, response_id: str, owner: str) -> None:
        """Raises ShoalError (404) as ``get`` does."""
        self.get(response_id, owner)
        self._drop(response_id)

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age_s
        while self._kept and next(iter(self._kept.values())).stored_at < oldest:
            self._drop(next(iter(self._kept)))

    def _drop(self, response_id: str) -> None:
        self.num_bytes -= self._kept.pop(response_id).num_bytes
