"""What other threads tell the dispatch loop."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.backend.chunk import Chunk
from shoal.backend.intake import PreparedRequest
from shoal.backend.request_class import RequestClass
from shoal.scheduler.errors import RequestError
from shoal.scheduler.tiers import Tier

Sink = Callable[[Chunk], None]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request is there; its prompt is still being prepared."""

    seq_id: int
    sink: Sink
    at: float  # monotonic


@dataclass(frozen=True, slots=True)
class Prepared:
    seq_id: int
    request: PreparedRequest
    request_class: RequestClass
    further_seq_ids: tuple[int, ...] = ()  # of its choices but the first, which has the request's


@dataclass(frozen=True, slots=True)
class Rejected:
    seq_id: int
    error: RequestError
    tier: Tier | None = None  # set where the queue's state was the reason
    was_full: bool = False  # refused by a drain estimate, which then has one more to retry


@dataclass(frozen=True, slots=True)
class RefusedElsewhere:
    """Requests that never came: the queue had no place for them."""

    tier: Tier
    count: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    seq_id: int


Order = Submitted | Prepared | Rejected | RefusedElsewhere | Cancelled
