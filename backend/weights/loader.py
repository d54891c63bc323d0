"""From a path to a model that can run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.build import AnyModel, build_model, is_unneeded, weight_shapes
from shoal.backend.quantization.plan import plan_formats
from shoal.backend.quantization.schemes import SCHEMES
from shoal.backend.weights.gguf import GgufCheckpoint
from shoal.backend.weights.safetensors import SafetensorsCheckpoint
from shoal.backend.weights.tensor_source import TensorSource
from shoal.kernels.quantized_weights import Weight

Checkpoint = GgufCheckpoint | SafetensorsCheckpoint
# Called with a phase, and bytes done and in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: AnyModel
    config: AnyConfig


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    quantization: str = "none",
) -> LoadedModel:
    """Load a GGUF file or a checkpoint folder, with weights in ``dtype`` on ``device``.

    ``quantization`` packs matrices as they come: see ``quantization.plan``.

    Raises ConfigError, naming the file and the tensor, when the checkpoint does not fit its config.
    """
    return load_opened(open_checkpoint(path), dtype, device, progress, quantization)


def load_opened(
    source: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    quantization: str = "none",
) -> LoadedModel:
    """``load_model`` of a checkpoint that is open already."""
    config = source.config
    shapes = weight_shapes(config)
    check_tensors(source, shapes, config)
    formats = plan_formats(shapes, quantization)
    tensors = _load_tensors(source, shapes, formats, dtype, device, progress or _ignore)
    return LoadedModel(build_model(config, tensors), config)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open by what is there: a GGUF file, a folder with config.json, or one with one GGUF file."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return SafetensorsCheckpoint(path)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return GgufCheckpoint(ggufs[0])
        raise ConfigError(f"{path.name} holds neither config.json nor exactly one .gguf file.")
    if path.suffix == ".safetensors":
        raise ConfigError(f"{path.name}: give the folder that holds it and its config.json.")
    return GgufCheckpoint(path)


def check_tensors(
    source: TensorSource, shapes: dict[str, tuple[int, ...]], config: AnyConfig
) -> None:
    """Raise ConfigError unless a checkpoint holds exactly the tensors of its model."""
    names = source.names()
    for name, shape in shapes.items():
        if name not in names:
            raise ConfigError(f"{source.where(name)} is missing.")
        if not _fits(source, name, shape):
            raise ConfigError(
                f"{source.where(name)} has shape {list(source.shape(name))}, "
                f"but the config asks for {list(shape)}."
            )
    for name in sorted(names - shapes.keys()):
        if not is_unneeded(name, config):
            raise ConfigError(f"{source.where(name)} belongs to no part of this model.")


def _fits(source: TensorSource, name: str, shape: tuple[int, ...]) -> bool:
    """A packed weight's columns may end in padding; what they hold is checked as it is read."""
    stored = source.shape(name)
    if stored == shape or name not in source.packed_names():
        return stored == shape
    return len(shape) == 2 and stored[0] == shape[0] and 0 <= stored[1] - shape[1] < 8


def _load_tensors(
    source: TensorSource,
    shapes: Mapping[str, tuple[int, ...]],
    formats: dict[str, str],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress,
) -> dict[str, Weight]:
    total = sum(source.num_bytes(name) for name in shapes)
    done = 0
    tensors: dict[str, Weight] = {}
    progress("weights", done, total)
    for name in shapes:
        weight = source.load(name, dtype).to(device)
        if tuple(weight.shape) != shapes[name]:
            raise ConfigError(f"{source.where(name)} has shape {list(weight.shape)}.")
        scheme = SCHEMES.get(formats.get(name, "none"))
        if scheme is not None and isinstance(weight, torch.Tensor):
            weight = scheme(weight, dtype)
        tensors[name] = weight
        done += source.num_bytes(name)
        progress("weights", done, total)
    return tensors


def _ignore(phase: str, done: int, total: int) -> None:
    """No one is watching."""
