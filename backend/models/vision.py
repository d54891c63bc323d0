"""The part of a model that sees images, for the families that have one."""

import importlib.util
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from shoal.backend.messages import ImageForm
from shoal.backend.models.any_config import ServedConfig
from shoal.backend.models.gemma3_vision import load_gemma3_vision
from shoal.backend.models.gemma4_config import Gemma4Config
from shoal.backend.models.gemma4_vision import load_gemma4_vision
from shoal.backend.models.model_config import ModelConfig


class Vision(Protocol):
    """An encoder of images, and how a prompt holds them."""

    form: ImageForm

    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        """From uint8 [height, width, 3] to [num_tokens, hidden_size]."""
        ...


def load_vision(
    path: Path, config: ServedConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Vision | None, str | None]:
    """The encoder of a checkpoint; else None, and why not if the model would see images.

    Raises ConfigError where a tensor of the encoder is missing or wrong.
    """
    if not isinstance(config, Gemma4Config | ModelConfig):
        return None, None
    if config.image_token_id is None or not path.is_dir():
        return None, None
    if importlib.util.find_spec("transformers") is None:
        return None, "the Python package transformers is missing; pip install 'transformers>=5.24'"
    if isinstance(config, Gemma4Config):
        return load_gemma4_vision(path, dtype, device), None
    return load_gemma3_vision(path, dtype, device), None
