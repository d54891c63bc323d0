"""Checkpoints as a folder with ``config.json`` and safetensors files."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.registry import config_from_hf

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 64 * 2**20
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsCheckpoint:
    """A checkpoint folder as a TensorSource. Raises ConfigError, naming the file at fault."""

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        self._files: dict[str, Any] = {}  # tensor name to its open file
        self._file_names: dict[str, str] = {}
        for path in _weight_files(folder):
            self._add_file(path)

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def num_bytes(self, name: str) -> int:
        item_bytes = _ITEM_BYTES.get(self._files[name].get_slice(name).get_dtype(), 1)
        return math.prod(self.shape(name)) * item_bytes

    def where(self, name: str) -> str:
        return f"{self._file_names.get(name, _SINGLE)}: tensor {name}"

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        kind = self._files[name].get_slice(name).get_dtype()
        if kind not in _ITEM_BYTES:
            raise ConfigError(
                f"{self.where(name)} has type {kind}. Supported: {', '.join(_ITEM_BYTES)}."
            )
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.to(dtype).contiguous()

    def _add_file(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt", device="cpu")
            names = list(file.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path.name} is damaged or cut short; fetch it again.") from error
        for name in names:
            if name in self._files:
                raise ConfigError(
                    f"tensor {name} is both in {self._file_names[name]} and in {path.name}."
                )
            self._files[name] = file
            self._file_names[name] = path.name


def read_config(folder: Path) -> AnyConfig:
    """The shape of a folder's model. Raises ConfigError where no family of ours can run it."""
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = _read_json(generation) if generation.is_file() else None
    try:
        return config_from_hf(config, generation_config)
    except ConfigError as error:
        raise ConfigError(f"config.json: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
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


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise ConfigError(
        f"{folder.name} holds neither {_SINGLE} nor {_INDEX}. "
        "Other formats (.bin, .pt) are not read; convert them to safetensors."
    )


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{_INDEX}: weight_map is missing.")
    names = set(weight_map.values())
    for name in names:
        # Only plain names: an index must not reach out of its folder.
        if not isinstance(name, str) or name != Path(name).name:
            raise ConfigError(f"{_INDEX}: weight_map must hold plain file names.")
        if not (folder / name).is_file():
            raise ConfigError(f"{_INDEX}: {name} is missing; fetch the checkpoint again.")
    return [folder / name for name in sorted(names)]
