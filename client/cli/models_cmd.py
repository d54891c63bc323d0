"""``shoal models``: what is in the catalogue and the repository, what is here, what is served."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import URLError

import psutil

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import CATALOGUE, resolve_weights
from shoal.backend.weights.describe import describe_checkpoint
from shoal.client.cli.fetch import model_is_present
from shoal.client.cli.progress import mebibytes
from shoal.client.cli.serve import model_repository, read_engine_config, repository_models
from shoal.client.cli.settings import ServeSettings, api_key_headers
from shoal.client.openai.tls import trusted_by


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One line of the list."""

    name: str
    description: str
    num_bytes: int | None  # None: not from the catalogue
    is_here: bool
    is_served: bool
    # Of weights that are here and can be read; None else.
    family: str | None = None
    format: str | None = None
    context: int | None = None  # tokens, by the model
    longest_context: int | None = None  # of it what fits in memory now; 0: the model does not fit
    fault: str | None = None  # why weights that should be here cannot be read


def list_models(settings: ServeSettings) -> list[ModelRow]:
    """Catalogue models first, then models of the repository with weights of their own."""
    served = served_models(settings.openai_url, settings.tls_cert)
    rows = [
        ModelRow(
            name=entry.name,
            description=f"{entry.description} ({entry.license})",
            num_bytes=entry.file_bytes,
            is_here=model_is_present(entry, settings.cache_dir),
            is_served=entry.name in served,
            **_facts_of(entry.name, settings.cache_dir),
        )
        for entry in CATALOGUE.values()
    ]
    repository = model_repository(settings)
    for name in repository_models(repository):
        if name in CATALOGUE:
            continue
        try:
            weights = read_engine_config(repository, name).weights
            description, facts = f"weights: {weights}", _facts_of(weights, settings.cache_dir)
        except ConfigError as error:
            description, facts = "", {"fault": str(error)}
        size, is_here = facts.pop("num_bytes", None), facts.pop("is_here", True)
        rows.append(ModelRow(name, description, size, is_here, name in served, **facts))
    return rows


def _facts_of(weights: str, cache_root: Path) -> dict[str, Any]:
    """Fields of a ModelRow: what is told of weights that can be read, or why these cannot."""
    try:
        path = resolve_weights(weights, cache_root)
    except ConfigError as error:
        # What is in the catalogue need not have been fetched.
        return {} if weights in CATALOGUE else {"fault": str(error), "is_here": False}
    try:
        facts = describe_checkpoint(path)
    except ConfigError as error:
        return {"fault": str(error)}
    fields = {
        "family": facts.family,
        "format": facts.format,
        "context": facts.context,
        "longest_context": facts.longest_context(psutil.virtual_memory().available),
    }
    return fields if weights in CATALOGUE else fields | {"num_bytes": facts.num_bytes}


def served_models(openai_url: str, tls_cert: Path | None = None) -> frozenset[str]:
    """Names a running server lists; empty when none runs, or when it wants another key."""
    trusted = trusted_by(tls_cert)
    context = None if isinstance(trusted, bool) else trusted
    opener = request.build_opener(request.ProxyHandler({}), request.HTTPSHandler(context=context))
    asked = request.Request(f"{openai_url}/v1/models", headers=api_key_headers())
    try:
        with opener.open(asked, timeout=2) as reply:
            return frozenset(str(model["id"]) for model in json.load(reply)["data"])
    except (URLError, OSError, ValueError, KeyError, TypeError):
        return frozenset()


def rows_as_json(rows: list[ModelRow]) -> str:
    """For scripts."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def rows_as_text(rows: list[ModelRow]) -> str:
    """Aligned columns."""
    head = ("NAME", "SIZE", "HERE", "SERVED", "FAMILY", "FORMAT", "CONTEXT", "FITS", "DESCRIPTION")
    table = [head]
    for row in rows:
        size = "-" if row.num_bytes is None else mebibytes(row.num_bytes)
        here, served = ("yes" if flag else "no" for flag in (row.is_here, row.is_served))
        context = "-" if row.context is None else str(row.context)
        facts = (row.family or "-", row.format or "-", context, _fit(row))
        told = f"cannot be read: {row.fault}" if row.fault else row.description
        table.append((row.name, size, here, served, *facts, told))
    widths = [max(len(line[column]) for line in table) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in table
    )


def _fit(row: ModelRow) -> str:
    """Whether the model fits in memory, and with how much of its context if not with all."""
    if row.fault is not None:
        return "no"
    if row.longest_context is None or row.context is None:
        return "-"
    if row.longest_context >= row.context:
        return "yes"
    return f"up to {row.longest_context}" if row.longest_context else "no"
