"""API keys: who may call, for which tenant and how much. The file holds hashes, never keys."""

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.backend.engine_config import ConfigError, read_yaml
from shoal.scheduler.tiers import DEFAULT_TENANT

logger = logging.getLogger("shoal.openai")

KEY_PREFIX = "sk-shoal-"
KEY_BYTES = 32  # of randomness: a fast hash of so much cannot be searched
MAX_KEYS = 1024
MAX_KEY_LENGTH = 512  # of what a client presents
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
FILE_HEAD = (
    "# Keys of the OpenAI API, by SHA-256. A lost key cannot be read from here, only revoked.\n"
)
_LIMIT: Any = Field(None, ge=1, le=10**9)


class ApiKey(BaseModel):
    """One line of the key file. A limit that is None does not apply."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=NAME)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field("", max_length=128)  # "": the key's name
    slo_class: str | None = Field(None, min_length=1, max_length=64)  # None: the default tier
    requests_per_minute: int | None = _LIMIT
    tokens_per_minute: int | None = _LIMIT
    max_concurrent: int | None = _LIMIT

    @property
    def owner(self) -> str:
        """The tenant of every request that is made with this key."""
        return self.tenant or self.name


class KeyRing:
    """All keys that are valid at one time."""

    def __init__(self, keys: tuple[ApiKey, ...] = ()) -> None:
        self.keys = keys

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented, in a time that does not tell how much of one was right."""
        digest = hash_key(presented)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def new_key() -> str:
    """A fresh random key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> KeyRing:
    """Read a key file. Raises ConfigError naming the entry and what it must be."""
    title = f"The key file {path}"
    values = read_yaml(path, title)
    entries = values.get("keys") if isinstance(values, dict) else None
    if not isinstance(entries, list) or set(values) != {"keys"}:
        raise ConfigError(f"{title} must hold one list named keys. Make it with: shoal keys add.")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{title} holds more than {MAX_KEYS} keys.")
    keys = tuple(_read_key(title, index, entry) for index, entry in enumerate(entries))
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            raise ConfigError(f"{title} has two keys of the same {field}.")
    return KeyRing(keys)


def _read_key(title: str, index: int, entry: Any) -> ApiKey:
    try:
        key = ApiKey.model_validate(entry)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part)[:64] for part in (f"keys[{index}]", *fault["loc"]))
        allowed = ", ".join(ApiKey.model_fields)
        raise ConfigError(f"{title}: {where}: {fault['msg']}. Fields: {allowed}.") from None
    check_tenant(key, f"{title}: keys[{index}]")
    return key


def check_tenant(key: ApiKey, where: str) -> None:
    """Raise ConfigError for the tenant whose cached prefixes are public."""
    if key.owner == DEFAULT_TENANT:
        raise ConfigError(
            f"{where}: the tenant {DEFAULT_TENANT!r} is that of requests without a key. "
            "Name another tenant."
        )


def write_keys(path: Path, ring: KeyRing) -> None:
    """Replace the file in one move, so that a running server never reads half of it."""
    entries = [key.model_dump(exclude_defaults=True) for key in ring.keys]
    text = FILE_HEAD + yaml.safe_dump({"keys": entries}, sort_keys=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # mkstemp gives mode 0600.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error.strerror}.") from error


class KeyFile:
    """The key file of a running server, read again whenever it changes.

    A file that has become invalid or is gone changes nothing: the keys read last stay in force.
    """

    def __init__(self, path: Path, on_change: Callable[[KeyRing], None]) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._path = path
        self._on_change = on_change
        self._seen = self._signature()
        on_change(read_keys(path))

    async def follow(self, interval_s: float) -> None:
        """Look at the file for ever."""
        while True:
            await asyncio.sleep(interval_s)
            self.check()

    def check(self) -> None:
        """Read the file if it is another than the one seen last."""
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            ring = read_keys(self._path)
        except ConfigError as error:
            logger.error("%s The keys read before stay in force.", error)
            return
        self._on_change(ring)
        logger.info("%d keys read from %s", len(ring.keys), self._path)

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
