"""Sampling parameters of one sequence, validated once at the edge."""

import math
import re
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

from shoal.scheduler.errors import RequestError
from shoal.scheduler.session_eviction import KV_POLICIES, LRU, MIN_KV_BUDGET

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_CHOICES = 32
MIN_REPETITION_PENALTY = 0.01  # it divides: logits must stay finite


POOLINGS = ("mean", "last")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose each next token. Raises RequestError, naming the field, when out of range.

    ``max_tokens=None`` means up to the end of the context; intake replaces it by a number.
    ``seed=None`` means intake draws one, so that a replay gives the same text.
    ``logprobs`` is the number of top alternatives to report with each token's own log-probability.
    ``kv_policy`` says what happens to a sequence's keys and values beyond ``kv_budget`` tokens
    (see ``session_eviction``); ``lru`` keeps them all and knows no budget.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0  # of tokens that the output holds already
    frequency_penalty: float = 0.0  # the same, for each time
    repetition_penalty: float = 1.0  # divides; of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, all computed anew
    pooling: str | None = None  # mean or last: an embedding of the prompt is wanted, and no text
    dimensions: int | None = None  # of the embedding; None: all
    n: int = 1
    grammar: str | None = None  # llguidance's form of what the text must follow; set by intake
    grammar_param: str | None = None  # the request's field that the grammar comes from
    kv_policy: str = LRU
    kv_budget: int | None = None  # tokens, rounded up to blocks; set with a lossy kv_policy only

    def __post_init__(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 2.0)
        _check_logit_bias(self.logit_bias)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        # A prompt may be scored or embedded alone.
        least = 1 if self.prompt_logprobs is None and self.pooling is None else 0
        _check_int("max_tokens", self.max_tokens, least, 2**31 - 1, optional=True)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("n", self.n, 1, MAX_CHOICES)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos must be true or false.", param="ignore_eos")
        _check_kv(self.kv_policy, self.kv_budget)
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        _check_pooling(self)
        if self.prompt_logprobs is not None and self.n > 1:
            raise RequestError("prompt_logprobs needs n to be 1.", param="n")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}).", param="min_tokens"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken. A tiny temperature counts as zero."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def only_likeliest(self) -> bool:
        """Whether nothing but the token of the largest logit is wanted, of logits as they are."""
        return (
            self.greedy
            and self.logprobs is None
            and self.grammar is None
            and not self.logit_bias
            and not self.has_penalties
        )

    def for_choice(self, index: int) -> "SamplingParams":
        """Of one of the ``n`` choices. The first is what a request for one would get; the seeds of
        the others follow from its own."""
        if index == 0 or self.seed is None:
            return self if self.n == 1 else replace(self, n=1)
        digest = sha256(f"{self.seed}/{index}".encode()).digest()
        seed = int.from_bytes(digest[:8]) & MAX_SEED
        return replace(self, n=1, seed=seed)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SamplingParams":
        """Build from decoded JSON. Null means absent; an unknown name is an error, never dropped.

        ``stop`` may be a string or a list of strings; ``max_completion_tokens`` and
        ``max_new_tokens`` are taken as ``max_tokens`` (the first one present in that order wins
        over ``max_tokens``). ``logit_bias`` is an object from token id (a string) to number.
        """
        known = {field.name for field in fields(cls)} - {"grammar", "grammar_param"}
        values = {name: value for name, value in values.items() if value is not None}
        for alias in ("max_completion_tokens", "max_new_tokens"):
            if alias in values:
                _check_int(alias, values[alias], 0, 2**31 - 1)
                values["max_tokens"] = values.pop(alias)
                break
        for alias in ("max_completion_tokens", "max_new_tokens"):
            values.pop(alias, None)
        unknown = sorted(set(values) - known)
        if unknown:
            raise RequestError(
                f"Unknown sampling parameter {unknown[0][:64]!r}. "
                f"Allowed: {', '.join(sorted(known))}.",
                param=unknown[0][:64],
                code="unknown_parameter",
            )
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        for name in ("stop", "stop_token_ids"):
            if name in values:
                if not isinstance(values[name], list | tuple):
                    raise RequestError(f"{name} must be a list.", param=name, code="invalid_type")
                values[name] = tuple(values[name])
        if "logit_bias" in values:
            values["logit_bias"] = _read_logit_bias(values["logit_bias"])
        return cls(**values)


def _check_float(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number.", param=name, code="invalid_type")
    # NaN compares false with everything, so ask what must hold, not what must not.
    above = value > low if low_open else value >= low
    if not (math.isfinite(value) and above and value <= high):
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}].", param=name)


def _check_int(name: str, value: Any, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    # A whole number beyond 64 bits comes out of JSON as a float.
    is_huge = isinstance(value, float) and abs(value) > MAX_SEED
    if isinstance(value, bool) or not (isinstance(value, int) or is_huge):
        raise RequestError(f"{name} must be a whole number.", param=name, code="invalid_type")
    if is_huge or not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}].", param=name)


def _check_kv(policy: Any, budget: Any) -> None:
    if not isinstance(policy, str) or policy not in KV_POLICIES:
        raise RequestError(
            f"kv_policy must be one of {', '.join(KV_POLICIES)}.",
            param="kv_policy",
            code="invalid_value" if isinstance(policy, str) else "invalid_type",
        )
    _check_int("kv_budget", budget, MIN_KV_BUDGET, 2**31 - 1, optional=True)
    if policy == LRU and budget is not None:
        raise RequestError(
            "kv_budget goes with kv_policy attention_sink or h2o; lru keeps the whole sequence.",
            param="kv_budget",
        )
    if policy != LRU and budget is None:
        raise RequestError(
            f"kv_policy {policy} needs a kv_budget: tokens to keep, in "
            f"[{MIN_KV_BUDGET}, {2**31 - 1}].",
            param="kv_budget",
            code="missing_parameter",
        )


def _check_stop(stop: Any) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings.", param="stop")
    for text in stop:
        if not isinstance(text, str):
            raise RequestError("stop must hold strings.", param="stop", code="invalid_type")
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"Each stop string must have 1 to {MAX_STOP_LENGTH} characters.", param="stop"
            )


def _check_stop_token_ids(ids: Any) -> None:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids"
        )
    for token_id in ids:
        _check_int("stop_token_ids", token_id, 0, 2**31 - 1)


def _read_logit_bias(value: Any) -> tuple[tuple[int, Any], ...]:
    if not isinstance(value, dict):
        raise RequestError(
            "logit_bias must be an object from token id to number.",
            param="logit_bias",
            code="invalid_type",
        )
    for token_id in value:
        if not (isinstance(token_id, str) and re.fullmatch("[0-9]{1,10}", token_id)):
            raise RequestError(
                f"logit_bias must name tokens by their ids, not {str(token_id)[:32]!r}.",
                param="logit_bias",
            )
    _check_logit_bias_size(value)
    return tuple((int(token_id), bias) for token_id, bias in value.items())


def _check_logit_bias_size(entries: Any) -> None:
    if len(entries) > MAX_LOGIT_BIAS_TOKENS:
        raise RequestError(
            f"logit_bias takes at most {MAX_LOGIT_BIAS_TOKENS} tokens.", param="logit_bias"
        )


def _check_logit_bias(entries: tuple[tuple[int, Any], ...]) -> None:
    _check_logit_bias_size(entries)
    for token_id, bias in entries:
        _check_int("logit_bias", token_id, 0, 2**31 - 1)
        _check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
    if len({token_id for token_id, _ in entries}) < len(entries):
        raise RequestError("logit_bias must name each token once.", param="logit_bias")


def _check_pooling(params: SamplingParams) -> None:
    if params.pooling not in (None, *POOLINGS):
        raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}.", param="pooling")
    _check_int("dimensions", params.dimensions, 1, 2**31 - 1, optional=True)
    if params.pooling is None:
        if params.dimensions is not None:
            raise RequestError("dimensions needs pooling.", param="dimensions")
        return
    for name, is_set in (
        ("n", params.n > 1),
        ("max_tokens", bool(params.max_tokens)),
        ("logprobs", params.logprobs is not None),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("kv_budget", params.kv_budget is not None),
    ):
        if is_set:
            raise RequestError(f"{name} cannot be used with pooling. Leave it out.", param=name)
