"""``shoal keys``: makes, lists and revokes the keys of the OpenAI API."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.backend.engine_config import ConfigError
from shoal.client.openai.api_keys import (
    MAX_KEYS,
    ApiKey,
    KeyRing,
    check_tenant,
    hash_key,
    new_key,
    read_keys,
    write_keys,
)


def add_key(path: Path | None, name: str, limits: dict[str, Any]) -> str:
    """Put a new key in the file, which is made if it is missing; returns the key itself."""
    path = _named(path)
    keys = read_keys(path).keys if path.exists() else ()
    if any(key.name == name for key in keys):
        raise ConfigError(f"There is a key named {name!r} already. Revoke it, or choose another.")
    if len(keys) >= MAX_KEYS:
        raise ConfigError(f"A key file holds at most {MAX_KEYS} keys. Revoke some first.")
    secret = new_key()
    given = {field: value for field, value in limits.items() if value is not None}
    try:
        key = ApiKey(name=name, sha256=hash_key(secret), **given)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(f"{fault['loc'][0]}: {fault['msg']}.") from None
    check_tenant(key, name)
    write_keys(path, KeyRing((*keys, key)))
    return secret


def revoke_key(path: Path | None, name: str) -> None:
    """Take a key out of the file; running servers see it within a second or two."""
    path = _named(path)
    keys = read_keys(path).keys
    left = tuple(key for key in keys if key.name != name)
    if len(left) == len(keys):
        known = ", ".join(key.name for key in keys) or "none"
        raise ConfigError(f"There is no key named {name!r}. There are: {known}.")
    write_keys(path, KeyRing(left))


def keys_as_text(path: Path | None) -> str:
    """A table of the keys; of the keys themselves only the beginning of the hash."""
    rows = [["NAME", "TENANT", "TIER", "REQUESTS/MIN", "TOKENS/MIN", "AT ONCE", "SHA-256"]]
    for key in read_keys(_named(path)).keys:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent)
        told = ["-" if limit is None else str(limit) for limit in limits]
        rows.append([key.name, key.owner, key.slo_class or "-", *told, key.sha256[:12]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _named(path: Path | None) -> Path:
    if path is None:
        raise ConfigError("Name the key file: --keys-file FILE, or SHOAL_KEYS_FILE.")
    return path
