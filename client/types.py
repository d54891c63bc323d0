"""What the SDK gives back: plain typed results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. ``cached_tokens`` is the part of the prompt whose KV was reused."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice gained in a stream: the text and tokens since its last delta.

    ``num_input_tokens`` and ``num_cached_tokens`` are totals (0 where the server did not tell);
    ``num_output_tokens`` counts the tokens of this delta. Each choice's last delta has a finish
    reason. ``index`` tells the choices of one request apart.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_output_tokens: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    logprobs: str | None = None  # JSON, as the backend wrote it
    prompt_logprobs: str | None = None  # the same, of the prompt's tokens
    embedding: bytes = b""  # of the prompt: float32, little-endian
    reasoning: str = ""  # what the model thought, before its answer
    tool_calls: str | None = None  # JSON: deltas of calls, each with its call's index
    cumulative_logprob: float | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. ``finish_reason`` is "stop", "length" or "tool_calls".

    Of a request for several choices this is the first one; ``others`` has the further ones, and
    only the first's ``usage`` counts the prompt. Over HTTP it also counts the others' answers,
    and there are no ``token_ids``.
    """

    text: str
    finish_reason: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    others: tuple["Completion", ...] = ()
    reasoning: str = ""  # what the model thought, before its answer
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One version of a model in the server's repository."""

    name: str
    version: str
    ready: bool
    reason: str = ""
    loading: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The backend's own account of one loaded model, as its control output tells it."""

    state: str  # loading | ready | stuck | restarting | draining
    model: str = ""
    version: str = ""
    step: int = 0
    step_age_ms: float = 0.0
    free_blocks: int = 0
    total_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    num_live: int = 0
    queue: Mapping[str, Any] | None = None  # see shoal.client.openai.door.Door
    num_preemptions: int = 0
    pressure: str = "calm"  # of the memory that steps need: calm, high or critical
    token_budget: int = 0  # of a step; lower than configured while memory is short
    num_failed_allocations: int = 0
    host_blocks_used: int = 0  # KV blocks in host memory
    host_blocks_total: int = 0
    disk_blocks: int = 0
    num_checkpoints: int = 0  # preempted sequences that were copied to the host
    num_restores: int = 0  # and back
    num_demoted_blocks: int = 0  # of cached prefixes, to the host
    num_promoted_blocks: int = 0  # and back
    cached_blocks: int = 0  # that cached prefixes hold
    num_query_tokens: int = 0  # of prompts, looked up among the cached prefixes
    num_hit_tokens: int = 0  # of these, found
    num_evicted_blocks: int = 0  # of cached prefixes
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict)  # totals by tier
    worker_restarts: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    time: float = 0.0  # seconds since the epoch, by the server's clock
    self_test: Mapping[str, Any] | None = None  # what the start-up test found; None: not asked for
