"""Gemma 3's images: transformers' SigLIP encoder and projector with the checkpoint's weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.messages import ImageForm
from shoal.backend.models.image_encoder import (
    ImageEncoder,
    fill_encoder,
    import_family,
    read_preprocessor,
    read_their_config,
)
from shoal.backend.weights.safetensors import SafetensorsCheckpoint

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_OLDER = "vision_model."  # in the names of checkpoints as they were released
_HEAD = "head."  # pools an image into one vector; nobody asks for it
_PROCESSOR_OPTIONS = (
    "size",
    "resample",
    "image_mean",
    "image_std",
    "rescale_factor",
    "do_resize",
    "do_rescale",
    "do_normalize",
)


class _Encoder(torch.nn.Module):
    def __init__(self, config: Any, transformers: Any, modeling: Any) -> None:
        super().__init__()
        self.vision_tower = transformers.SiglipVisionModel(config.vision_config)
        self.multi_modal_projector = modeling.Gemma3MultiModalProjector(config)


class Gemma3Vision(ImageEncoder):
    """As many embeddings for every image."""

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        """[num_tokens, hidden_size] for one image, uint8 [height, width, 3]."""
        weight = next(self._encoder.parameters())
        inputs = self._inputs(pixels)
        states = self._encoder.vision_tower(
            pixel_values=inputs["pixel_values"].to(weight.device, weight.dtype)
        ).last_hidden_state
        embeddings: torch.Tensor = self._encoder.multi_modal_projector(states)
        return embeddings[0]


def load_gemma3_vision(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Gemma3Vision:
    """Load the encoder of a Gemma3ForConditionalGeneration checkpoint.

    Raises ConfigError where transformers is missing, or a tensor of the encoder is.
    """
    transformers, modeling, processing = import_family("gemma3")
    config = read_their_config(transformers, folder)
    config.vision_config._attn_implementation = "sdpa"
    config.vision_config.vision_use_head = False
    encoder = _Encoder(config, transformers, modeling)
    fill_encoder(encoder, _tensors(folder, dtype), folder, device)
    options = _processor_options(folder, config.vision_config.image_size)
    form = ImageForm(
        placeholder_id=config.boi_token_index,
        image_token_id=config.image_token_id,
        begin_token_id=config.boi_token_index,
        end_token_id=config.eoi_token_index,
        max_tokens=config.mm_tokens_per_image,
        margin="\n\n",
        both_ways=True,
    )
    return Gemma3Vision(encoder, processing.Gemma3ImageProcessorPil(**options), form)


def _tensors(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    source = SafetensorsCheckpoint(folder)
    tensors = {}
    for name in source.names():
        if name.startswith(_TOWER):
            own = name.removeprefix(_TOWER).removeprefix(_OLDER)
            if not own.startswith(_HEAD):
                tensors[_TOWER + own] = source.load(name, dtype)
        elif name.startswith(_PROJECTOR):
            tensors[name] = source.load(name, dtype)
    return tensors


def _processor_options(folder: Path, image_size: int) -> dict[str, Any]:
    """How the checkpoint wants its images scaled and normalised."""
    values = read_preprocessor(folder)
    if values.get("do_pan_and_scan"):
        raise ConfigError(
            f"{folder.name}: preprocessor_config.json: do_pan_and_scan is not supported. "
            "Set images: false to serve text alone."
        )
    options = {"size": {"height": image_size, "width": image_size}}
    options |= {name: values[name] for name in _PROCESSOR_OPTIONS if values.get(name) is not None}
    return options
