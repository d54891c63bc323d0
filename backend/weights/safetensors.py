"""Checkpoints as a folder with ``config.json`` and safetensors files."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.registry import config_from_hf
from shoal.backend.weights.checkpoint_folder import SINGLE, read_json, weight_files
from shoal.backend.weights.packed_formats import PackedFormat, packed_format
from shoal.backend.weights.safetensors_file import SafetensorsFile
from shoal.kernels.quantized_weights import Weight

_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """A checkpoint folder as a TensorSource. Raises ConfigError, naming the file at fault.

    A quantised module's tensors appear as one weight of its dense shape.
    """

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        self._packed = packed_format(_quantization(folder))
        self._files: dict[str, SafetensorsFile] = {}  # by tensor
        for path in weight_files(folder):
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
        return f"{file.name if file else SINGLE}: tensor {stored}"

    def load(self, name: str, dtype: torch.dtype) -> Weight:
        if name in self._modules:
            return self._load_packed(name, dtype)
        kind = self._files[name].tensors[name].dtype_name
        if kind not in _FLOATS:
            raise ConfigError(
                f"{self.where(name)} has type {kind}. Supported: {', '.join(_FLOATS)}."
            )
        return self._files[name].read(name, dtype)

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
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else None
    try:
        packed_format(config.pop("quantization_config", None))
        return config_from_hf(config, generation_config)
    except ConfigError as error:
        raise ConfigError(f"config.json: {error}") from error


def _quantization(folder: Path) -> dict[str, Any] | None:
    return read_json(folder / "config.json").get("quantization_config")


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
