"""Settings of ``shoal serve``: flag over environment over file over default, with origins."""

import difflib
import ipaddress
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shoal.backend.engine_config import ConfigError, read_yaml
from shoal.backend.weights.catalogue import DEFAULT_MODEL, cache_dir
from shoal.client.cli.ports import PortUse

ENV_PREFIX = "SHOAL_"
# Variables that are no settings of `shoal serve` but are read elsewhere.
OTHER_VARIABLES = (
    "SHOAL_TRITONSERVER",
    "SHOAL_API_KEY",
    "SHOAL_CONTROL_KEY",
    "SHOAL_GUARD_STACK_BYTES",
)
ORIGIN = re.compile(r"\*|https?://[^/\s@?#]+")


class ServeSettings(BaseModel):
    """What ``shoal serve`` starts, and where it listens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    openai_port: int = Field(9000, ge=1, le=65535)
    http_port: int = Field(8000, ge=1, le=65535)
    grpc_port: int = Field(8001, ge=1, le=65535)
    metrics_port: int = Field(8002, ge=1, le=65535)
    model_repository: Path | None = None  # None: the one that comes with the package
    model: list[str] = Field([DEFAULT_MODEL], min_length=1, max_length=64)
    cache_dir: Path = Field(default_factory=cache_dir)
    run_dir: Path | None = None  # None: one per OpenAI port, see ``resolved_run_dir``
    drain_timeout_s: int = Field(30, ge=0, le=3600)
    self_test: int | None = Field(None, ge=0, le=64)  # None: as each model's settings have it
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    keys_file: Path | None = None  # None: nobody needs a key
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origin: list[str] = Field([], max_length=64)
    triton_host: str | None = None  # None: see ``resolved_triton_host``
    shim_workers: int = Field(1, ge=1, le=32)

    @field_validator("model", "cors_origin", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """``a,b`` in the environment or the file means two models."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("model")
    @classmethod
    def _plain_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not name or name.startswith((".", "-")) or "/" in name:
                raise ValueError("must name folders of the model repository")
        if len(set(names)) != len(names):
            raise ValueError("names a model twice")
        return names

    @field_validator("cors_origin")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError("must be origins such as https://chat.example.com, or *")
        return origins

    @field_validator("host", "triton_host")
    @classmethod
    def _one_host(cls, host: str | None) -> str | None:
        if host is None:
            return None
        if not host or any(character.isspace() for character in host):
            raise ValueError("must be an address such as 127.0.0.1 or 0.0.0.0")
        return host

    @field_validator("model_repository", "cache_dir", "run_dir", "keys_file", "tls_cert", "tls_key")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @property
    def local_host(self) -> str:
        """Where processes on this machine reach what listens on ``host``."""
        return _local(self.host)

    @property
    def resolved_triton_host(self) -> str:
        """Triton's own ports ask for no key: beside keys they are for this machine alone."""
        return self.triton_host or ("127.0.0.1" if self.keys_file else self.host)

    @property
    def local_triton_host(self) -> str:
        return _local(self.resolved_triton_host)

    @property
    def openai_url(self) -> str:
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://{_bracketed(self.local_host)}:{self.openai_port}"

    @property
    def grpc_url(self) -> str:
        return f"{_bracketed(self.local_triton_host)}:{self.grpc_port}"

    @property
    def open_to_all(self) -> bool:
        """Whether other machines can call without a key."""
        return self.keys_file is None and not _is_loopback(self.host)

    @property
    def resolved_run_dir(self) -> Path:
        """Sockets, logs and the private backend folder of this server.

        Not in the cache: a socket path holds about 100 bytes, so the folder must be near the root.
        """
        if self.run_dir is not None:
            return self.run_dir
        base = os.environ.get("XDG_RUNTIME_DIR")
        if base and os.path.isdir(base) and os.access(base, os.W_OK):
            return Path(base) / "shoal" / str(self.openai_port)
        return Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}" / str(self.openai_port)

    @property
    def port_uses(self) -> list[PortUse]:
        """Every port with the flag that sets it."""
        host = self.resolved_triton_host
        return [
            PortUse(self.host, self.openai_port, "--openai-port", "OpenAI API"),
            PortUse(host, self.http_port, "--http-port", "Triton HTTP"),
            PortUse(host, self.grpc_port, "--grpc-port", "Triton gRPC"),
            PortUse(host, self.metrics_port, "--metrics-port", "Triton metrics"),
        ]


def api_key_headers() -> dict[str, str]:
    """What commands that call a running server send: the key of SHOAL_API_KEY, if there is one."""
    key = os.environ.get("SHOAL_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def _local(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """One setting as it came out, and where its value is from."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class LayeredSettings:
    """The settings to use and the origin of each."""

    settings: ServeSettings
    origins: dict[str, str]

    def rows(self) -> list[SettingOrigin]:
        """In the order in which the settings are declared."""
        values = self.settings.model_dump(mode="json")
        return [
            SettingOrigin(name, values[name], self.origins.get(name, "default"))
            for name in ServeSettings.model_fields
        ]


def load_settings(
    flags: Mapping[str, Any],
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> LayeredSettings:
    """Put the layers together. ``flags`` holds None for a flag that was not given.

    Raises ConfigError naming the setting, its allowed values, and the layer it came from.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if config_file is not None:
        for name, value in _read_file(config_file).items():
            values[name], origins[name] = value, f"file {config_file}"
    for name in ServeSettings.model_fields:
        variable = ENV_PREFIX + name.upper()
        if environ.get(variable):
            values[name], origins[name] = environ[variable], f"env {variable}"
    for name, value in flags.items():
        if value is not None:
            values[name], origins[name] = value, f"flag --{name.replace('_', '-')}"
    try:
        return LayeredSettings(ServeSettings.model_validate(values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from error


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each SHOAL_* variable that nothing reads, naming the likely one."""
    known = [ENV_PREFIX + name.upper() for name in ServeSettings.model_fields]
    unknown = [
        name
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in (*known, *OTHER_VARIABLES)
    ]
    return [_unknown_variable(name, [*known, OTHER_VARIABLES[0]]) for name in unknown]


def _unknown_variable(name: str, known: list[str]) -> str:
    closest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"The environment variable {name[:64]} is unknown and ignored: did you mean {closest}?"


def _read_file(path: Path) -> dict[str, Any]:
    values = read_yaml(path, f"--config {path}")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold a mapping of setting names to values.")
    known = list(ServeSettings.model_fields)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"--config {path}: unknown setting {str(key)[:64]!r}. Allowed: {', '.join(known)}."
            )
    return {str(key): value for key, value in values.items() if value is not None}


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        name = str(fault["loc"][0])
        lines.append(
            f"{name} {_rule(name, fault['msg'])} (got {fault['input']!r:.80} "
            f"from {origins.get(name, 'default')})."
        )
    return "\n".join(lines)


def _rule(name: str, message: str) -> str:
    """What a setting must be, as the end of a sentence that begins with its name."""
    field = ServeSettings.model_fields[name]
    bounds = {
        kind: getattr(limit, kind)
        for limit in field.metadata
        for kind in ("ge", "le")
        if hasattr(limit, kind)
    }
    if field.annotation is int and len(bounds) == 2:
        return f"must be a whole number in [{bounds['ge']}, {bounds['le']}]"
    return message.removeprefix("Value error, ").replace("Input should", "must", 1)
