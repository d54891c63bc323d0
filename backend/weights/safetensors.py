"""Checkpoints as a folder with ``config.json`` and safetensors files."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.registry import config_from_hf
from shoal.backend.weights.packed_formats import PackedFormat, packed_format
from shoal.backend.weights.safetensors_file import SafetensorsFile
from shoal.kernels.quantized_weights import Weight

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 64 * 2**20
_MAX_NAME_BYTES = 255
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """A checkpoint folder as a TensorSource. Raises ConfigError, naming the file at fault.

    A quantised module's tensors appear as one weight of its dense shape.
    """

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        self._packed = packed_format(_quantization(folder))
        self._files: dict[str, SafetensorsFile] = {}  # by tensor
        for path in _weight_files(folder):
            self._add_file(path)
        self._modules = _packed_modules(self._files, self._packed)  # weight -> part -> tensor

    def names(self) -> set[str]:
        parts = {name for tensors in self._modules.values() for name in tensors.values()}
        return (set(self._files) - parts) | set(self._modules)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._modules:
            return self._files[name].tensors[name].shape
        assert self._packed is not None
        stored = self._modules[name][self._packed.main]
        shape = self._files[stored].tensors[stored].shape
        if len(shape) != 2:
            raise ConfigError(f"{self.where(stored)} has {len(shape)} dimensions instead of 2.")
        return self._packed.shape(shape)

    def packed_names(self) -> Container[str]:
        return self._modules

    def num_bytes(self, name: str) -> int:
        stored = self._modules[name].values() if name in self._modules else (name,)
        return sum(self._files[tensor].tensors[tensor].num_bytes for tensor in stored)

    def where(self, name: str) -> str:
        stored = name
        if name in self._modules and self._packed is not None:
            stored = self._modules[name][self._packed.main]
        file = self._files.get(stored)
        return f"{file.name if file else _SINGLE}: tensor {stored}"

    def load(self, name: str, dtype: torch.dtype) -> Weight:
        if name in self._modules:
            return self._load_packed(name, dtype)
        kind = self._files[name].tensors[name].dtype_name
        if kind not in _FLOATS:
            raise ConfigError(
                f"{self.where(name)} has type {kind}. Supported: {', '.join(_FLOATS)}."
            )
        return self._files[name].read(name).to(dtype)

    def _load_packed(self, name: str, dtype: torch.dtype) -> Weight:
        assert self._packed is not None
        tensors = {
            part: self._files[stored].read(stored) for part, stored in self._modules[name].items()
        }
        for part in self._packed.required:
            if part not in tensors:
                raise ConfigError(f"{self.where(name)} comes without its {part}.")
        try:
            weight = self._packed.decode(tensors, dtype)
        except ConfigError as error:
            raise ConfigError(f"{self.where(name)}: {error}.") from error
        except (RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(f"{self.where(name)} and its scales do not fit together.") from error
        return weight

    def _add_file(self, path: Path) -> None:
        file = SafetensorsFile(path)
        for name in file.tensors:
            if name in self._files:
                raise ConfigError(
                    f"tensor {name} is both in {self._files[name].name} and in {file.name}."
                )
            self._files[name] = file


def read_config(folder: Path) -> AnyConfig:
    """The shape of a folder's model. Raises ConfigError where no family of ours can run it."""
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = _read_json(generation) if generation.is_file() else None
    try:
        packed_format(config.pop("quantization_config", None))
        return config_from_hf(config, generation_config)
    except ConfigError as error:
        raise ConfigError(f"config.json: {error}") from error


def _quantization(folder: Path) -> dict[str, Any] | None:
    return _read_json(folder / "config.json").get("quantization_config")


def _packed_modules(
    files: dict[str, SafetensorsFile], form: PackedFormat | None
) -> dict[str, dict[str, str]]:
    """Names of each quantised module's tensors by their part, by the name of the dense weight."""
    if form is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    for name in files:
        stem, _, part = name.rpartition(".")
        # What a module that is not quantised has too (``weight``) says nothing by itself.
        if part == form.main and (form.main != "weight" or f"{stem}.weight_scale" in files):
            parts = (form.main, *form.parts)
            found[f"{stem}.weight"] = {
                other: f"{stem}.{other}" for other in parts if f"{stem}.{other}" in files
            }
    return found


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
        return [_within(folder, _SINGLE)]
    raise ConfigError(
        f"{folder.name} holds neither {_SINGLE} nor {_INDEX}. "
        "Other formats (.bin, .pt) are not read; convert them to safetensors."
    )


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = _read_json(folder / _INDEX).get("weight_map")
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
