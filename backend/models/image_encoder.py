"""What the families' image encoders share: transformers' modules with a checkpoint's weights.

An encoder runs one image at a time, so that an image's embeddings depend on nothing else.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.messages import ImageForm


class ImageEncoder:
    """From pixels to embeddings of the text model's width; ``form`` is how a prompt holds them."""

    def __init__(self, encoder: Any, processor: Any, form: ImageForm) -> None:
        self._encoder = encoder
        self._processor = processor
        self.form = form

    def _inputs(self, pixels: np.ndarray) -> Any:
        """What the encoder is fed for one image, uint8 [height, width, 3]."""
        return self._processor(
            images=[pixels], return_tensors="pt", input_data_format="channels_last"
        )


def import_family(name: str) -> tuple[Any, Any, Any]:
    """transformers, and a family's modules of models and of images. Raises ConfigError."""
    try:
        return (
            importlib.import_module("transformers"),
            importlib.import_module(f"transformers.models.{name}.modeling_{name}"),
            importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}"),
        )
    except ImportError:
        raise ConfigError(
            "images need the Python package transformers, new enough for the model's family: "
            "pip install 'transformers>=5.24'."
        ) from None


def read_their_config(transformers: Any, folder: Path) -> Any:
    """The checkpoint's configuration as transformers has it."""
    return transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )


def fill_encoder(
    encoder: torch.nn.Module,
    tensors: Mapping[str, Any],
    folder: Path,
    device: torch.device | str,
) -> torch.nn.Module:
    """Give an encoder its weights. Raises ConfigError where one is missing or of another shape."""
    try:
        # Assigned, so that what a checkpoint does not hold (frequencies) keeps its own type.
        encoder.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{folder.name}: the image encoder does not fit: {reason} "
            "Set images: false to serve text alone."
        ) from error
    return encoder.to(device).eval().requires_grad_(False)


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """``preprocessor_config.json``; empty without one."""
    path = folder / "preprocessor_config.json"
    values: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return values
