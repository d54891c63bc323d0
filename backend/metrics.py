"""Publishes the service's counts as metrics of the Triton server, from one timer thread."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.backend.messages import CacheStatus, MemoryStatus
from shoal.scheduler.tier_counts import TierCounts

PRESSURES = ("calm", "high", "critical")
PUBLISH_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Gauges and running totals of one model version. Totals count what clients were sent."""

    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    sequences_running: int = 0
    requests_queued: int = 0
    engine_steps: int = 0
    worker_restarts: int = 0
    memory: MemoryStatus = MemoryStatus()
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    cache: CacheStatus = CacheStatus()
    requests: dict[str, int] = field(default_factory=dict)  # by finish reason
    parity_ok: bool | None = None  # of the self-test; None: not run
    tiers: dict[str, TierCounts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    description: str
    counter: bool
    read: Callable[[ServiceCounts], int]


_METRICS = (
    _Metric("shoal_kv_blocks_free", "KV blocks free now", False, lambda c: c.kv_blocks_free),
    _Metric("shoal_kv_blocks_total", "KV blocks in the pool", False, lambda c: c.kv_blocks_total),
    _Metric(
        "shoal_sequences_running", "Sequences running now", False, lambda c: c.sequences_running
    ),
    _Metric(
        "shoal_requests_queued", "Requests waiting for a worker", False, lambda c: c.requests_queued
    ),
    _Metric("shoal_engine_steps_total", "Engine steps", True, lambda c: c.engine_steps),
    _Metric("shoal_worker_restarts_total", "Workers replaced", True, lambda c: c.worker_restarts),
    _Metric(
        "shoal_memory_pressure",
        "Shortness of memory for steps: 0 calm, 1 high, 2 critical",
        False,
        lambda c: PRESSURES.index(c.memory.pressure),
    ),
    _Metric(
        "shoal_step_token_budget",
        "Tokens that a step may have: fewer than configured while memory is short",
        False,
        lambda c: c.memory.token_budget,
    ),
    _Metric(
        "shoal_failed_allocations_total",
        "Allocations that failed in a step",
        True,
        lambda c: c.memory.num_failed_allocations,
    ),
    _Metric(
        "shoal_kv_host_blocks_used",
        "KV blocks in host memory now",
        False,
        lambda c: c.memory.host_blocks_used,
    ),
    _Metric(
        "shoal_kv_host_blocks_total",
        "KV blocks for which there is host memory",
        False,
        lambda c: c.memory.host_blocks_total,
    ),
    _Metric("shoal_kv_disk_blocks", "KV blocks on disk now", False, lambda c: c.memory.disk_blocks),
    _Metric(
        "shoal_kv_checkpoints_total",
        "Preempted sequences copied to the host",
        True,
        lambda c: c.memory.num_checkpoints,
    ),
    _Metric(
        "shoal_kv_restores_total",
        "Preempted sequences copied back from the host",
        True,
        lambda c: c.memory.num_restores,
    ),
    _Metric(
        "shoal_kv_demoted_blocks_total",
        "Blocks of cached prefixes moved from the device to the host",
        True,
        lambda c: c.memory.num_demoted_blocks,
    ),
    _Metric(
        "shoal_kv_promoted_blocks_total",
        "Blocks of cached prefixes copied back from the host",
        True,
        lambda c: c.memory.num_promoted_blocks,
    ),
    _Metric(
        "shoal_preemptions_total",
        "Sequences that lost their KV blocks for want of room",
        True,
        lambda c: c.preemptions,
    ),
    _Metric(
        "shoal_prefix_query_tokens_total",
        "Prompt tokens looked up among the cached prefixes",
        True,
        lambda c: c.cache.num_query_tokens,
    ),
    _Metric(
        "shoal_prefix_hit_tokens_total",
        "Of these, tokens found",
        True,
        lambda c: c.cache.num_hit_tokens,
    ),
    _Metric(
        "shoal_prefix_evicted_blocks_total",
        "Cached blocks given up for want of room",
        True,
        lambda c: c.cache.num_evicted_blocks,
    ),
    _Metric(
        "shoal_prefix_cached_blocks",
        "Blocks that cached prefixes hold",
        False,
        lambda c: c.cache.cached_blocks,
    ),
    _Metric(
        "shoal_prompt_tokens_total",
        "Prompt tokens of accepted requests",
        True,
        lambda c: c.prompt_tokens,
    ),
    _Metric(
        "shoal_generation_tokens_total", "Generated tokens", True, lambda c: c.generation_tokens
    ),
)
_PARITY = "shoal_parity_ok"


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A family with labels, and its counts by their values.

    The values of a label are few: reasons are codes of ours, tiers those of the settings.
    """

    name: str
    description: str
    labels: tuple[str, ...]
    read: Callable[[ServiceCounts], Iterator[tuple[tuple[str, ...], int]]]


def _by_tier(field_name: str) -> Callable[[ServiceCounts], Iterator[tuple[tuple[str, ...], int]]]:
    def read(counts: ServiceCounts) -> Iterator[tuple[tuple[str, ...], int]]:
        for tier, of_tier in counts.tiers.items():
            yield (tier,), getattr(of_tier, field_name)

    return read


def _refused(counts: ServiceCounts) -> Iterator[tuple[tuple[str, ...], int]]:
    for tier, of_tier in counts.tiers.items():
        for code, number in of_tier.refused.items():
            yield (tier, code), number


def _targets(what: str) -> Callable[[ServiceCounts], Iterator[tuple[tuple[str, ...], int]]]:
    def read(counts: ServiceCounts) -> Iterator[tuple[tuple[str, ...], int]]:
        for tier, of_tier in counts.tiers.items():
            for met in ("met", "missed"):
                yield (tier, met), getattr(of_tier, f"{what}_{met}")

    return read


_LABELLED = (
    _Labelled(
        "shoal_requests_total",
        "Finished requests by finish reason",
        ("finish_reason",),
        lambda c: (((reason,), number) for reason, number in c.requests.items()),
    ),
    _Labelled(
        "shoal_requests_refused_total",
        "Requests that were not taken, by error code",
        ("tier", "reason"),
        _refused,
    ),
    _Labelled(
        "shoal_requests_shed_total", "Queued requests that made way", ("tier",), _by_tier("shed")
    ),
    _Labelled(
        "shoal_requests_timed_out_total",
        "Requests whose timeout was over",
        ("tier",),
        _by_tier("timed_out"),
    ),
    _Labelled(
        "shoal_requests_preempted_total",
        "Times a running request made way for a higher tier",
        ("tier",),
        _by_tier("preempted"),
    ),
    _Labelled(
        "shoal_requests_replayed_total",
        "Times a request was queued again as its worker died",
        ("tier",),
        _by_tier("replayed"),
    ),
    _Labelled(
        "shoal_ttft_target_total",
        "Requests with a first token within the tier's target, and later",
        ("tier", "result"),
        _targets("ttft"),
    ),
    _Labelled(
        "shoal_tpot_target_total",
        "Finished requests with a time per token within the tier's target, and longer",
        ("tier", "result"),
        _targets("tpot"),
    ),
)


class MetricsPublisher:
    """Copies counts into metric families each second. A fault here never reaches serving.

    Each call on a metric is a round trip to the server, so only values that changed are written,
    and never from a thread that serves. ``set`` holds the GIL meanwhile, for ever when the server
    dies, so gauges too are moved by ``increment``, which does not.
    """

    def __init__(
        self,
        pb_utils: Any,
        labels: dict[str, str],
        counts: Callable[[], ServiceCounts],
        interval_s: float = PUBLISH_INTERVAL_S,
    ) -> None:
        self._family_type = pb_utils.MetricFamily
        self._labels = labels
        self._counts = counts
        self._interval_s = interval_s
        self._families: dict[str, Any] = {}  # a family that is let go takes its metrics with it
        self._metrics: dict[str, Any] = {}  # by name, and by finish reason for requests
        self._published: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish a last time and end the thread."""
        self._stopping.set()
        self._thread.join(5)

    def _run(self) -> None:
        try:
            self._create()
            while not self._stopping.wait(self._interval_s):
                self._publish()
            self._publish()
        except Exception as error:
            # The server refuses metrics when its own are off; serving goes on without them.
            log.warning("metrics are not published: %s", error)

    def _create(self) -> None:
        for metric in _METRICS:
            self._add_family(metric.name, metric.description, metric.counter)
            self._metrics[metric.name] = self._families[metric.name].Metric(labels=self._labels)
        for family in _LABELLED:
            self._add_family(family.name, family.description, True)

    def _add_family(self, name: str, description: str, counter: bool) -> None:
        kind = self._family_type.COUNTER if counter else self._family_type.GAUGE
        self._families[name] = self._family_type(name=name, description=description, kind=kind)

    def _publish(self) -> None:
        counts = self._counts()
        for metric in _METRICS:
            self._write(metric.name, metric.read(counts), metric.counter)
        if counts.parity_ok is not None:
            self._publish_parity(counts.parity_ok)
        for family in _LABELLED:
            for values, number in family.read(counts):
                self._write_labelled(family, values, number)

    def _write_labelled(self, family: _Labelled, values: tuple[str, ...], number: int) -> None:
        key = ".".join((family.name, *values))
        if key not in self._metrics:
            if not number:
                return
            labels = {**self._labels, **dict(zip(family.labels, values, strict=True))}
            self._metrics[key] = self._families[family.name].Metric(labels=labels)
        self._write(key, number, counter=True)

    def _publish_parity(self, ok: bool) -> None:
        """There is no such metric before a self-test has run: no answer is not a no."""
        if _PARITY not in self._metrics:
            text = "Whether the self-test found transformers' results at start-up"
            self._add_family(_PARITY, text, counter=False)
            self._metrics[_PARITY] = self._families[_PARITY].Metric(labels=self._labels)
        self._write(_PARITY, int(ok), counter=False)

    def _write(self, key: str, value: int, counter: bool) -> None:
        change = value - self._published.get(key, 0)
        # A counter never goes back, whatever its source does.
        if change > 0 or (change < 0 and not counter):
            self._metrics[key].increment(change)
            self._published[key] = value
