"""The files of a checkpoint folder: which hold its weights, and its JSON. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from shoal.backend.engine_config import ConfigError

_INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 64 * 2**20
_MAX_NAME_BYTES = 255


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names, or the only one. Raises ConfigError for one that is not there."""
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    if (folder / SINGLE).is_file():
        return [_within(folder, SINGLE)]
    raise ConfigError(
        f"{folder.name} holds neither {SINGLE} nor {_INDEX}. "
        "Other formats (.bin, .pt) are not read; convert them to safetensors."
    )


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{_INDEX}: weight_map is missing.")
    for name in weight_map.values():
        # Only plain names: an index must not reach out of its folder.
        is_plain = isinstance(name, str) and name == Path(name).name and name.isprintable()
        if not is_plain or len(name.encode()) > _MAX_NAME_BYTES:
            raise ConfigError(f"{_INDEX}: weight_map must hold plain file names.")
        if not (folder / name).is_file():
            raise ConfigError(f"{_INDEX}: {name} is missing; fetch the checkpoint again.")
    return [_within(folder, name) for name in sorted(set(weight_map.values()))]


def _within(folder: Path, name: str) -> Path:
    """The file, unless it is a link that leads elsewhere than the folder or, as in the hub's cache
    (snapshots/<revision>/ beside blobs/), to the files of the same repository."""
    target = (folder / name).resolve()
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parents[1] / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ConfigError(f"{name} is a link that leaves its folder; put the file itself there.")
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError, naming the file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ConfigError(f"{path.name} is larger than {_MAX_JSON_BYTES} bytes.")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not valid JSON.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path.name} must hold a JSON object.")
    return values
