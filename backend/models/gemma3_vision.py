"""Gemma 3's images: transformers' SigLIP encoder and projector with the checkpoint's weights.

The encoder runs one image at a time, so that an image's embeddings depend on nothing else.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.messages import ImageForm
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


class Gemma3Vision:
    """From pixels to embeddings of the text model's width, as many for every image."""

    def __init__(self, encoder: _Encoder, processor: Any, form: ImageForm) -> None:
        self._encoder = encoder
        self._processor = processor
        self.form = form

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        """[num_tokens, hidden_size] for one image, uint8 [height, width, 3]."""
        weight = next(self._encoder.parameters())
        inputs = self._processor(
            images=[pixels], return_tensors="pt", input_data_format="channels_last"
        )
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
    try:
        transformers: Any = importlib.import_module("transformers")
        modeling: Any = importlib.import_module("transformers.models.gemma3.modeling_gemma3")
        processing: Any = importlib.import_module(
            "transformers.models.gemma3.image_processing_pil_gemma3"
        )
    except ImportError:
        raise ConfigError(
            "images need the Python package transformers: pip install 'transformers>=5.24'."
        ) from None
    config = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    config.vision_config._attn_implementation = "sdpa"
    config.vision_config.vision_use_head = False
    encoder = _Encoder(config, transformers, modeling)
    try:
        encoder.load_state_dict(_tensors(folder, dtype), strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{folder.name}: the image encoder does not fit: {reason} "
            "Set images: false to serve text alone."
        ) from error
    encoder = encoder.to(device).eval().requires_grad_(False)
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
    path = folder / "preprocessor_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if values.get("do_pan_and_scan"):
        raise ConfigError(
            f"{folder.name}: preprocessor_config.json: do_pan_and_scan is not supported. "
            "Set images: false to serve text alone."
        )
    options = {"size": {"height": image_size, "width": image_size}}
    options |= {name: values[name] for name in _PROCESSOR_OPTIONS if values.get(name) is not None}
    return options
