"""SLA tiers and tenants: what a request may ask for, and what it may use."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.scheduler.errors import RequestError

DEFAULT_TIER = "standard"
DEFAULT_TENANT = "default"
ANY_TENANT = "*"  # settings of every tenant that is not named
MAX_TIERS = 16
MAX_TENANT_LENGTH = 128  # characters
_MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class Tier:
    """A service class. The larger ``weight``, the larger its share and the higher the tier.

    The targets are what operators promise: time to first token and time per output token, in ms.
    Raises ValueError on a bad value.
    """

    name: str
    weight: float = 1.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        _check_name("a tier's name", self.name, 64)
        _check_number(f"tiers.{self.name}.weight", self.weight, 0.001, _MAX_WEIGHT)
        for field_name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, field_name)
            if value is not None:
                _check_number(f"tiers.{self.name}.{field_name}", value, 1, 86_400_000)


class TierTable:
    """The tiers of one model, by name. Raises ValueError when they make no sense together."""

    def __init__(self, tiers: Iterable[Tier], default: str | None = None) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        if not 1 <= len(self._tiers) <= MAX_TIERS:
            raise ValueError(f"tiers must name 1 to {MAX_TIERS} tiers.")
        if default is None:
            default = DEFAULT_TIER if DEFAULT_TIER in self._tiers else next(iter(self._tiers))
        if not isinstance(default, str) or default not in self._tiers:
            raise ValueError(f"default_tier must be one of {', '.join(self._tiers)}.")
        self.default = self._tiers[default]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tiers)

    def get(self, slo_class: Any = None) -> Tier:
        """The tier a request asked for. Raises RequestError, naming the allowed ones."""
        if slo_class is None or slo_class == "":
            return self.default
        tier = self._tiers.get(slo_class) if isinstance(slo_class, str) else None
        if tier is None:
            raise RequestError(
                f"slo_class must be one of {', '.join(self._tiers)}.", param="slo_class"
            )
        return tier

    @classmethod
    def from_dict(cls, values: Any, default: str | None = None) -> "TierTable":
        """Build from decoded YAML: tier names to ``weight``, ``ttft_ms``, ``tpot_ms``."""
        entries = _check_mapping("tiers", values, Tier)
        return cls((Tier(name, **entry) for name, entry in entries.items()), default)


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What one tenant may use. ``weight`` is its share, where the policy is a fair one.

    ``max_requests`` counts those queued and those in service; ``max_tokens`` their prompts and the
    outputs they may still ask for. Raises ValueError on a bad value.
    """

    weight: float = 1.0
    max_requests: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_number("a tenant's weight", self.weight, 0.001, _MAX_WEIGHT)
        for field_name in ("max_requests", "max_tokens"):
            value = getattr(self, field_name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"a tenant's {field_name} must be a whole number from 1.")


class TenantTable:
    """Settings by tenant; those of ``"*"`` hold for every tenant that is not named."""

    def __init__(self, tenants: Mapping[str, TenantSettings] | None = None) -> None:
        self._tenants = dict(tenants or {})
        self._other = self._tenants.pop(ANY_TENANT, TenantSettings())

    def get(self, tenant: str) -> TenantSettings:
        return self._tenants.get(tenant, self._other)

    @classmethod
    def from_dict(cls, values: Any) -> "TenantTable":
        """Build from decoded YAML: names to ``weight``, ``max_requests``, ``max_tokens``."""
        entries = _check_mapping("tenants", values, TenantSettings)
        for name in entries:
            _check_name("a tenant's name", name, MAX_TENANT_LENGTH)
        return cls({name: TenantSettings(**entry) for name, entry in entries.items()})


def tenant_name(value: Any = None) -> str:
    """The tenant a request belongs to. Raises RequestError when that is no name."""
    if value is None or value == "":
        return DEFAULT_TENANT
    if not isinstance(value, str) or len(value) > MAX_TENANT_LENGTH:
        raise RequestError(
            f"tenant must be text of at most {MAX_TENANT_LENGTH} characters.", param="tenant"
        )
    return value


def _check_mapping(what: str, values: Any, entry_type: type) -> dict[str, dict[str, Any]]:
    """``values`` as a mapping of names to mappings whose keys are fields of ``entry_type``."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} must map names to settings.")
    allowed = [item.name for item in fields(entry_type) if item.name != "name"]
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in values.items():
        entries[name] = {} if entry is None else entry
        if not isinstance(entries[name], Mapping):
            raise ValueError(f"{what}.{name} must map {', '.join(allowed)} to values.")
        unknown = sorted(str(key) for key in set(entries[name]) - set(allowed))
        if unknown:
            raise ValueError(
                f"unknown setting {unknown[0][:64]!r} in {what}.{name}. "
                f"Allowed: {', '.join(allowed)}."
            )
    return entries


def _check_name(what: str, name: Any, longest: int) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= longest or not name.isprintable():
        raise ValueError(f"{what} must be text of 1 to {longest} characters.")


def _check_number(what: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{what} must be a number in [{low:g}, {high:g}].")
