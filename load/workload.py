"""What a simulated client sends: a prompt made of named pieces, and how many tokens it wants."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_128

DEFAULT_TENANT = "default"
DEFAULT_SLO_CLASS = "standard"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Equal keys give equal tokens; a longer one begins as a shorter does."""

    key: str
    num_tokens: int


@lru_cache(maxsize=65536)
def segment_tokens(segment: Segment) -> tuple[int, ...]:
    """Token ids in [0, 65535], a pure function of the segment."""
    digest = shake_128(segment.key.encode()).digest(2 * segment.num_tokens)
    return struct.unpack(f"<{segment.num_tokens}H", digest)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request, in tokens."""

    prompt: int
    output: int


@dataclass(slots=True, eq=False)
class Request:
    """One request of a workload. ``arrival`` of a follow-up counts from the end of the one before.

    The answer is the segment ``answer``, so that the next turn of a chat can quote it.
    """

    arrival: float  # seconds
    prompt: tuple[Segment, ...]
    answer: Segment
    tenant: str = DEFAULT_TENANT
    slo_class: str = DEFAULT_SLO_CLASS
    follow_up: "Request | None" = None
    patience_s: float | None = None  # the client goes away when no token has come by then
    timeout_s: float | None = None  # told to the server: too late after that

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.num_prompt_tokens, self.num_output_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.prompt)

    @property
    def num_output_tokens(self) -> int:
        return self.answer.num_tokens

    def prompt_tokens(self) -> list[int]:
        """The whole prompt as token ids."""
        tokens: list[int] = []
        for segment in self.prompt:
            tokens.extend(segment_tokens(segment))
        return tokens


@dataclass(frozen=True, slots=True)
class Tier:
    """A service level: what its requests expect, and their weight against other tiers."""

    ttft_ms: float
    tpot_ms: float
    weight: float = 1.0


# Within reach of the default step cost when all slots are taken.
DEFAULT_TIER = Tier(ttft_ms=10_000, tpot_ms=2000)


@dataclass(slots=True)
class Workload:
    """Requests in order of arrival, and whom they belong to."""

    name: str
    description: str  # one line: source, scale factors, rates
    requests: list[Request]
    tiers: dict[str, Tier] = field(default_factory=lambda: {DEFAULT_SLO_CLASS: DEFAULT_TIER})
    tenant_weights: dict[str, float] = field(default_factory=dict)  # absent: 1

    def __post_init__(self) -> None:
        self.requests.sort(key=lambda request: request.arrival)

    @property
    def num_requests(self) -> int:
        """With all follow-ups."""
        return sum(1 for request in self.requests for _ in chain(request))


def chain(request: Request | None) -> Iterator[Request]:
    """The request and all that follow from it."""
    while request is not None:
        yield request
        request = request.follow_up
