"""Gemma 4's images: transformers' encoder with the checkpoint's weights, without the text part."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.backend.messages import ImageForm
from shoal.backend.models.image_encoder import (
    ImageEncoder,
    fill_encoder,
    import_family,
    read_preprocessor,
    read_their_config,
)
from shoal.backend.weights.safetensors import SafetensorsCheckpoint

# What the encoder is called in the checkpoint, and in this module.
_PARTS = {"model.vision_tower.": "tower.", "model.embed_vision.": "embedder."}


class _Encoder(torch.nn.Module):
    def __init__(self, config: Any, modeling: Any) -> None:
        super().__init__()
        self.tower = modeling.Gemma4VisionModel(config.vision_config)
        self.embedder = modeling.Gemma4MultimodalEmbedder(config.vision_config, config.text_config)


class Gemma4Vision(ImageEncoder):
    """How many embeddings an image has follows from its shape."""

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray) -> torch.Tensor:
        """[num_soft_tokens, hidden_size] for one image, uint8 [height, width, 3]."""
        weight = next(self._encoder.parameters())
        inputs = self._inputs(pixels)
        states = self._encoder.tower(
            pixel_values=inputs["pixel_values"].to(weight.device),
            pixel_position_ids=inputs["image_position_ids"].to(weight.device),
        ).last_hidden_state
        embeddings: torch.Tensor = self._encoder.embedder(inputs_embeds=states)
        return embeddings


def load_gemma4_vision(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Gemma4Vision:
    """Load the encoder of a Gemma4ForConditionalGeneration checkpoint.

    Raises ConfigError where transformers is missing, or a tensor of the encoder is.
    """
    transformers, modeling, processing = import_family("gemma4")
    config = read_their_config(transformers, folder)
    for part in (config, config.vision_config, config.text_config):
        part._attn_implementation = "sdpa"
    encoder = _Encoder(config, modeling)
    source = SafetensorsCheckpoint(folder)
    tensors = {
        ours + name.removeprefix(theirs): source.load(name, dtype)
        for name in source.names()
        for theirs, ours in _PARTS.items()
        if name.startswith(theirs)
    }
    fill_encoder(encoder, tensors, folder, device)
    processor = processing.Gemma4ImageProcessorPil(**_processor_options(folder))
    return Gemma4Vision(encoder, processor, _form(config, processor))


def _form(config: Any, processor: Any) -> ImageForm:
    return ImageForm(
        placeholder_id=config.image_token_id,
        image_token_id=config.image_token_id,
        begin_token_id=config.boi_token_id,
        end_token_id=config.eoi_token_id,
        max_tokens=processor.max_soft_tokens,
        both_ways=config.text_config.use_bidirectional_attention == "vision",
        patch_size=processor.patch_size,
        pooling=processor.pooling_kernel_size,
    )


def _processor_options(folder: Path) -> dict[str, Any]:
    """Sizes that a checkpoint may set otherwise."""
    values = read_preprocessor(folder)
    names = ("max_soft_tokens", "patch_size", "pooling_kernel_size")
    return {name: values[name] for name in names if values.get(name) is not None}
