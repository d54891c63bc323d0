"""Small Gemma 4 checkpoints that see images, and prompts with images for them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gemma4_forms import SMALL, VARIANTS, fill
from their_sequence import random_ids
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from shoal.backend.forward_batch import SoftTokens
from shoal.backend.model_runner import build_forward_batch
from shoal.backend.weights.loader import LoadedModel
from shoal.load.tiny_models import aligned
from shoal.scheduler.outputs import ScheduledSequence

IMAGE, BEGIN, END = 300, 301, 302
PATCH, MAX_SOFT = 4, 70
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": PATCH,
    "position_embedding_size": 256,
    "standardize": True,
}


def make_images(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = [(20, 50, 3), (64, 16, 3), (33, 31, 3)][:count]
    return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def make_checkpoint(folder: Path, dtype: torch.dtype, variant: str) -> Any:
    text = SMALL | VARIANTS[variant] | {"sliding_window": 40}
    if variant != "e2b":  # as in the releases
        text["use_bidirectional_attention"] = "vision"
    tokens = {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
    tokens |= {"audio_token_id": 303, "video_token_id": 304}
    config = Gemma4Config(text_config=text, vision_config=VISION, **tokens)
    theirs: Any = Gemma4ForConditionalGeneration(config).to(dtype).eval()
    fill(theirs)
    theirs.save_pretrained(folder)
    sizes = {"patch_size": PATCH, "max_soft_tokens": MAX_SOFT, "pooling_kernel_size": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return aligned(Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval())


def their_features(theirs: Any, image: np.ndarray) -> Any:
    processor = Gemma4ImageProcessorPil(patch_size=PATCH, max_soft_tokens=MAX_SOFT)
    inputs = processor(images=[image], return_tensors="pt", input_data_format="channels_last")
    with torch.inference_mode():
        return theirs.get_image_features(
            inputs["pixel_values"], inputs["image_position_ids"], return_dict=True
        )


def interleave(lengths: list[int]) -> list[int]:
    """Text before, between and after the images."""
    ids = random_ids(3, 300, seed=1)
    for idx, length in enumerate(lengths):
        ids += [BEGIN, *[IMAGE] * length, END, *random_ids(4, 300, seed=idx)]
    return ids


def image_spans(ids: list[int]) -> list[range]:
    spans, start = [], None
    for position, token_id in enumerate([*ids, -1]):
        if token_id == IMAGE and start is None:
            start = position
        elif token_id != IMAGE and start is not None:
            spans.append(range(start, position))
            start = None
    return spans


def our_logits(
    loaded: LoadedModel, kv: Any, sequence: Any, num_tokens: int, features: torch.Tensor | None
) -> torch.Tensor:
    batch = build_forward_batch(
        [ScheduledSequence(sequence, num_tokens)], kv.block_size, torch.device("cpu")
    )
    batch = dataclasses.replace(batch, logits_indices=torch.arange(num_tokens))
    if features is not None:
        rows = (batch.input_ids == IMAGE).nonzero()[:, 0]
        soft = SoftTokens(rows, features, [image_spans(sequence.token_ids)])
        batch = dataclasses.replace(batch, soft_tokens=soft)
    logits = loaded.model.forward(batch, kv)
    sequence.num_computed_tokens += num_tokens
    return logits
