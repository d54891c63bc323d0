"""Whose a request is, how urgent it is, and how long it may take."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from shoal.backend.intake import (
    MAX_SAMPLING_BYTES,
    SAMPLING_METADATA_NAMES,
    ParameterValue,
    RawRequest,
)
from shoal.scheduler.errors import RequestError
from shoal.scheduler.tiers import DEFAULT_TENANT, Tier, TierTable, tenant_name

MAX_PROMPTS = 65536
MAX_TIMEOUT_MS = 24 * 3600 * 1000
HEADER_PREFIX = "x-shoal-"


@dataclass(frozen=True, slots=True)
class RequestClass:
    tenant: str
    tier: Tier
    timeout_s: float | None  # from submission to the last token
    cache_salt: bytes = b""  # only requests of equal salts share cached prefixes
    num_prompts: int = 1  # that its sender sends together and waits for together


def classify(raw: RawRequest, tiers: TierTable, most_seconds: float | None = None) -> RequestClass:
    """Read tenant, slo_class and timeout, without looking at the prompt. Raises RequestError.

    Request parameters win over the sampling parameters' JSON. A forwarded header such as
    ``x-shoal-tenant`` wins over both, as a gateway sets headers and a client the rest. No timeout
    is longer than ``most_seconds``, which is also that of a request without one.
    """
    values = {**_from_json(raw.sampling_parameters), **raw.parameters}
    tenant = tenant_name(_value(values, "tenant"))
    return RequestClass(
        tenant=tenant,
        tier=tiers.get(_value(values, "slo_class")),
        timeout_s=_capped(_timeout_s(_value(values, "timeout")), most_seconds),
        cache_salt=_cache_salt(tenant, _value(values, "cache_salt")),
        num_prompts=_num_prompts(raw.parameters.get("num_prompts", 1)),
    )


def _value(values: Mapping[str, ParameterValue], name: str) -> ParameterValue | None:
    header = values.get(HEADER_PREFIX + name.replace("_", "-"))
    return values.get(name) if header is None else header


def _from_json(text: str | bytes | None) -> dict[str, ParameterValue]:
    """What a valid JSON object says of the names allowed there; intake reports an invalid one."""
    if text is None or len(text) > MAX_SAMPLING_BYTES:
        return {}
    try:
        data = orjson.loads(text)
    except (orjson.JSONDecodeError, UnicodeError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {name: data[name] for name in SAMPLING_METADATA_NAMES if data.get(name) is not None}


def _cache_salt(tenant: str, own: ParameterValue | None) -> bytes:
    """One salt for each tenant, and within it for each ``cache_salt`` that a request names.

    Empty, the public salt, for the default tenant without one.
    """
    if tenant == DEFAULT_TENANT and own is None:
        return b""
    return hashlib.sha256(f"{tenant}\0{'' if own is None else own}".encode()).digest()


def _num_prompts(value: ParameterValue) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PROMPTS:
        raise RequestError(
            f"num_prompts must be a whole number in [1, {MAX_PROMPTS}].", param="num_prompts"
        )
    return value


def _capped(timeout_s: float | None, most_seconds: float | None) -> float | None:
    return min((s for s in (timeout_s, most_seconds) if s is not None), default=None)


def _timeout_s(value: ParameterValue | None) -> float | None:
    if value is None:
        return None
    try:
        timeout_ms = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        timeout_ms = math.nan
    if not 1 <= timeout_ms <= MAX_TIMEOUT_MS:
        raise RequestError(
            f"timeout must be a number of milliseconds in [1, {MAX_TIMEOUT_MS}].", param="timeout"
        )
    return timeout_ms / 1000
