"""What a simulation leaves behind: one record a request, and samples of the whole over time."""

from dataclasses import dataclass
from enum import StrEnum

from shoal.load.workload import Workload


class Outcome(StrEnum):
    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"
    NOT_SENT = "not sent"  # a turn of a chat whose turn before got no answer


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times are virtual seconds; arrival, first_token and ended as its client saw."""

    seq_id: int
    tenant: str
    slo_class: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int  # asked for
    outcome: Outcome | None = None
    ended: float | None = None
    accepted: float | None = None
    handed_over: float | None = None
    first_token: float | None = None
    num_delivered: int = 0
    num_cached_tokens: int = 0
    refused: float | None = None  # for the first time
    num_refusals: int = 0
    refusal_code: str | None = None
    retry_after_s: float | None = None  # of the first refusal
    would_be_accepted: float | None = None  # had the refused ones formed a line at the queue's door

    @property
    def queued(self) -> float | None:
        """Time in the dispatcher's queue, seconds."""
        if self.handed_over is None or self.accepted is None:
            return None
        return self.handed_over - self.accepted

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first, seconds."""
        if self.first_token is None or self.ended is None or self.num_delivered < 2:
            return None
        return (self.ended - self.first_token) / (self.num_delivered - 1)

    @property
    def e2e(self) -> float | None:
        """Arrival to last token, seconds; None unless it finished."""
        if self.outcome is not Outcome.FINISHED or self.ended is None:
            return None
        return self.ended - self.arrival


@dataclass(frozen=True, slots=True)
class TimelineSample:
    time: float
    num_queued: int  # in the dispatcher
    num_running: int
    num_waiting: int  # inside workers
    kv_usage: float  # share of all blocks


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """``contended_service``: weighted tokens by tenant while every tenant had a request queued."""

    workload: Workload
    records: list[RequestRecord]
    timeline: list[TimelineSample]
    contended_service: dict[str, float]
    contended_s: float
    duration_s: float
    busy_s: list[float]  # by worker
    num_steps: int
    num_scheduled: int
    num_preemptions: int
    num_events: int
    longest_pauses: dict[str, float]  # seconds without a token while requests arrive, by tier
