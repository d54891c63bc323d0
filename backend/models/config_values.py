"""Reading checked values out of a checkpoint's own description."""

import sys
from collections.abc import Mapping
from typing import Any

from shoal.backend.engine_config import ConfigError


def required(values: Mapping[str, Any], name: str) -> Any:
    """Raises ConfigError where the value is missing or null."""
    value = values.get(name)
    if value is None:
        raise ConfigError(f"{name} is missing.")
    return value


def or_default(values: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value, or ``default`` where it is missing or null."""
    value = values.get(name)
    return default if value is None else value


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Raises ConfigError unless ``value`` is a whole number in [low, high]; returns it."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number in [{low}, {high}].")
    return value


def check_positive(name: str, value: Any) -> float:
    """Raises ConfigError unless ``value`` is a finite number above 0; returns it."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} must be a number above 0.")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """Raises ConfigError unless ``value`` is true or false; returns it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false.")
    return value


def check_list(name: str, value: Any, length: int) -> list[Any]:
    """Raises ConfigError unless ``value`` is a list of ``length`` items; returns it."""
    if not isinstance(value, list) or len(value) != length:
        raise ConfigError(f"{name} must be a list of {length} items, one a layer.")
    return value


def check_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Raises ConfigError unless ``value`` is a mapping; returns it."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must hold a mapping.")
    return value
