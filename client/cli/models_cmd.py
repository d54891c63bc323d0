"""``shoal models``: what is in the catalogue and the repository, what is here, what is served."""

import json
from dataclasses import asdict, dataclass
from urllib import request
from urllib.error import URLError

from shoal.backend.engine_config import ConfigError
from shoal.backend.weights.catalogue import CATALOGUE
from shoal.client.cli.fetch import model_is_present
from shoal.client.cli.progress import mebibytes
from shoal.client.cli.serve import model_repository, read_engine_config, repository_models
from shoal.client.cli.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One line of the list."""

    name: str
    description: str
    num_bytes: int | None  # None: not from the catalogue
    is_here: bool
    is_served: bool


def list_models(settings: ServeSettings) -> list[ModelRow]:
    """Catalogue models first, then models of the repository with weights of their own."""
    served = served_models(settings.openai_url)
    rows = [
        ModelRow(
            name=entry.name,
            description=f"{entry.description} ({entry.license})",
            num_bytes=entry.file_bytes,
            is_here=model_is_present(entry, settings.cache_dir),
            is_served=entry.name in served,
        )
        for entry in CATALOGUE.values()
    ]
    repository = model_repository(settings)
    for name in repository_models(repository):
        if name in CATALOGUE:
            continue
        try:
            description = f"weights: {read_engine_config(repository, name).weights}"
        except ConfigError as error:
            description = str(error)
        rows.append(ModelRow(name, description, None, True, name in served))
    return rows


def served_models(openai_url: str) -> frozenset[str]:
    """Names a running server lists; empty when none runs."""
    opener = request.build_opener(request.ProxyHandler({}))
    try:
        with opener.open(f"{openai_url}/v1/models", timeout=2) as reply:
            return frozenset(str(model["id"]) for model in json.load(reply)["data"])
    except (URLError, OSError, ValueError, KeyError, TypeError):
        return frozenset()


def rows_as_json(rows: list[ModelRow]) -> str:
    """For scripts."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def rows_as_text(rows: list[ModelRow]) -> str:
    """Aligned columns."""
    table = [("NAME", "SIZE", "HERE", "SERVED", "DESCRIPTION")]
    for row in rows:
        size = "-" if row.num_bytes is None else mebibytes(row.num_bytes)
        here, served = ("yes" if flag else "no" for flag in (row.is_here, row.is_served))
        table.append((row.name, size, here, served, row.description))
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[4]])
        for line in table
    )
