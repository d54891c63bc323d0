"""Who runs a model: the families written here, or transformers over our paged cache."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.models.any_config import ServedConfig
from shoal.backend.models.build import AnyModel, weight_shapes
from shoal.backend.models.native import missing_ops
from shoal.backend.models.transformers_model import TransformersModel, load_through_transformers
from shoal.backend.quantization.plan import plan_formats
from shoal.backend.weights.catalogue import resolve_weights
from shoal.backend.weights.loader import Checkpoint, load_opened, open_checkpoint
from shoal.backend.weights.safetensors import read_config

logger = logging.getLogger(__name__)

ServedModel = AnyModel | TransformersModel


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """A loaded model, and the runner that it is of: custom or transformers."""

    model: ServedModel
    config: ServedConfig
    runner: str


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """A checkpoint, of which no weight is loaded yet."""

    path: Path
    source: Checkpoint | None  # None: transformers runs it
    refusal: str | None = None  # why no family written here does

    @property
    def sees_images(self) -> bool:
        return self.source is not None and self.source.config.image_token_id is not None

    def missing_ops(self, quantization: str) -> str | None:
        """What the native kernels lack to run it; None if they can."""
        if self.source is None:
            return "models that run through transformers"
        config = self.source.config
        shapes = weight_shapes(config)
        formats, packed = plan_formats(shapes, quantization), self.source.packed_names()
        return missing_ops(
            config,
            any(".experts." in name and (name in formats or name in packed) for name in shapes),
        )


def find_weights(config: EngineConfig) -> FoundWeights:
    """The checkpoint of these settings, for the runner that they ask for. Raises ConfigError."""
    path = resolve_weights(config.weights)
    refusal = _why_not_custom(path) if config.runner == "auto" else None
    if config.runner == "transformers" or refusal is not None:
        return FoundWeights(path, None, refusal)
    return FoundWeights(path, open_checkpoint(path))


def load_with_runner(
    config: EngineConfig,
    found: FoundWeights,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> ServedWeights:
    """Load the weights with the runner that was chosen.

    Raises ConfigError where it cannot run them, with the reason; with ``auto`` with both reasons.
    """
    if found.source is None:
        return _through_transformers(config, found.path, dtype, device, progress, found.refusal)
    loaded = load_opened(found.source, dtype, device, progress, config.quantization)
    return ServedWeights(loaded.model, loaded.config, "custom")


def _why_not_custom(path: Path) -> str | None:
    """Why no family written here fits a checkpoint folder; None if one does. Other forms than a
    folder with config.json are read by our loader alone."""
    if not (path / "config.json").is_file():
        return None
    try:
        read_config(path)
    except ConfigError as error:
        return str(error)
    return None


def _through_transformers(
    config: EngineConfig,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None],
    refusal: str | None,
) -> ServedWeights:
    if config.quantization != "none":
        raise ConfigError(
            f"{refusal + ' ' if refusal else ''}quantization: {config.quantization} needs the "
            "runner custom; set quantization: none to run through transformers."
        )
    progress("weights", 0, 0)
    try:
        model = load_through_transformers(path, dtype, device)
    except ConfigError as error:
        raise ConfigError(f"{refusal} {error}" if refusal else str(error)) from error
    logger.warning(
        "%s runs through transformers: slower, and a text can depend on what else runs.%s",
        model.config.family,
        f" Reason: {refusal}" if refusal else "",
    )
    return ServedWeights(model, model.config, "transformers")
