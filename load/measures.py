"""What a simulation's records say: percentiles, goodput, refusals, fairness, utilisation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.load.records import Outcome, RequestRecord, SimulationResult
from shoal.load.service_meter import jain_index
from shoal.load.workload import DEFAULT_TIER, Tier


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of times in seconds."""

    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Percentiles | None":
        """None when there is no value."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(*(float(p) for p in np.percentile(known, (50, 90, 95, 99))))


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The requests of one tenant or tier, or all of them."""

    name: str
    num_requests: int
    outcomes: dict[Outcome, int]
    queued: Percentiles | None  # of the TTFT: in the dispatcher's queue
    ttft: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    num_good: int  # finished within their tier's targets
    prompt_tokens: int  # of those that finished
    output_tokens: int  # delivered
    cached_tokens: int

    @property
    def goodput(self) -> float:
        """Share of all requests that finished within their targets."""
        return self.num_good / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True)
class RetryAfterSummary:
    """Of refused requests that were told when to retry.

    The error is ``|told − wait| / wait``: ``told`` at the first refusal, against the wait from then
    until a retry was accepted, for clients that retry whenever they are told to. ``line_error`` has
    another wait: how long a client would have stood in a line at the queue's door, where each place
    that comes free goes to the first. ``num_open``: never accepted, so not in ``error``.
    """

    num_told: int
    median_told_s: float
    num_open: int
    median_error: float | None
    p90_error: float | None
    median_line_error: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    overall: GroupSummary
    tenants: tuple[GroupSummary, ...]
    tiers: tuple[GroupSummary, ...]
    duration_s: float
    requests_per_s: float  # finished
    good_per_s: float
    output_tokens_per_s: float
    utilisation: tuple[float, ...]  # by worker: share of the time in steps
    mean_batch: float  # sequences a step
    num_steps: int
    num_preemptions: int
    max_queued: int
    mean_kv_usage: float
    retry_after: RetryAfterSummary | None
    jain: float | None  # over service / weight, while every tenant had something queued
    contended_s: float
    service_shares: dict[str, float]  # by tenant, of the service in that time


def summarize(result: SimulationResult) -> Summary:
    """Measure a finished run."""
    records = result.records
    tiers = result.workload.tiers
    overall = _group("all", records, tiers)
    duration = result.duration_s or 1.0
    return Summary(
        overall=overall,
        tenants=_groups(records, "tenant", tiers),
        tiers=_groups(records, "slo_class", tiers),
        duration_s=result.duration_s,
        requests_per_s=overall.outcomes.get(Outcome.FINISHED, 0) / duration,
        good_per_s=overall.num_good / duration,
        output_tokens_per_s=overall.output_tokens / duration,
        utilisation=tuple(busy / duration for busy in result.busy_s),
        mean_batch=result.num_scheduled / max(1, result.num_steps),
        num_steps=result.num_steps,
        num_preemptions=result.num_preemptions,
        max_queued=max((sample.num_queued for sample in result.timeline), default=0),
        mean_kv_usage=float(np.mean([sample.kv_usage for sample in result.timeline] or [0.0])),
        retry_after=_retry_after(records),
        jain=_weighted_jain(result),
        contended_s=result.contended_s,
        service_shares=_shares(result.contended_service),
    )


def is_good(record: RequestRecord, tier: Tier) -> bool:
    """Whether a request finished within its tier's targets. One token alone has no TPOT."""
    if record.outcome is not Outcome.FINISHED or record.ttft is None:
        return False
    return record.ttft * 1000 <= tier.ttft_ms and (record.tpot or 0.0) * 1000 <= tier.tpot_ms


def _groups(
    records: Sequence[RequestRecord], field_name: str, tiers: dict[str, Tier]
) -> tuple[GroupSummary, ...]:
    """A group for each value of a field; none when all records have the same."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(getattr(record, field_name), []).append(record)
    if len(groups) < 2:
        return ()
    return tuple(_group(name, groups[name], tiers) for name in sorted(groups))


def _group(name: str, records: Sequence[RequestRecord], tiers: dict[str, Tier]) -> GroupSummary:
    outcomes: dict[Outcome, int] = {}
    for record in records:
        assert record.outcome is not None
        outcomes[record.outcome] = outcomes.get(record.outcome, 0) + 1
    finished = [record for record in records if record.outcome is Outcome.FINISHED]
    return GroupSummary(
        name=name,
        num_requests=len(records),
        outcomes=outcomes,
        queued=Percentiles.of(record.queued for record in finished),
        ttft=Percentiles.of(record.ttft for record in finished),
        tpot=Percentiles.of(record.tpot for record in finished),
        e2e=Percentiles.of(record.e2e for record in finished),
        num_good=sum(is_good(r, tiers.get(r.slo_class, DEFAULT_TIER)) for r in finished),
        prompt_tokens=sum(record.num_prompt_tokens for record in finished),
        output_tokens=sum(record.num_delivered for record in records),
        cached_tokens=sum(record.num_cached_tokens for record in finished),
    )


def _retry_after(records: Sequence[RequestRecord]) -> RetryAfterSummary | None:
    told: list[float] = []
    errors: list[float] = []
    line_errors: list[float] = []
    for record in records:
        if record.retry_after_s is None or record.refused is None:
            continue
        told.append(record.retry_after_s)
        for accepted, into in (
            (record.accepted, errors),
            (record.would_be_accepted, line_errors),
        ):
            if accepted is not None and accepted > record.refused:
                wait = accepted - record.refused
                into.append(abs(record.retry_after_s - wait) / wait)
    if not told:
        return None
    return RetryAfterSummary(
        num_told=len(told),
        median_told_s=float(np.median(told)),
        num_open=len(told) - len(errors),
        median_error=float(np.median(errors)) if errors else None,
        p90_error=float(np.percentile(errors, 90)) if errors else None,
        median_line_error=float(np.median(line_errors)) if line_errors else None,
    )


def _weighted_jain(result: SimulationResult) -> float | None:
    if len(result.contended_service) < 2:
        return None
    weights = result.workload.tenant_weights
    return jain_index(
        service / weights.get(tenant, 1.0) for tenant, service in result.contended_service.items()
    )


def _shares(service: dict[str, float]) -> dict[str, float]:
    total = sum(service.values())
    return {tenant: value / total for tenant, value in service.items()} if total else {}
