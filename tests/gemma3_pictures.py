"""A small Gemma 3 checkpoint that sees images."""

import json
from pathlib import Path
from typing import Any

import torch
from gemma4_forms import fill
from gemma4_pictures import BEGIN, END, IMAGE
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from shoal.load.tiny_models import aligned

TOKENS_PER_IMAGE = 16
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
PROCESSOR = {
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_gemma3_checkpoint(folder: Path, dtype: torch.dtype, **changes: Any) -> Any:
    """Written to ``folder``; transformers' model of it."""
    config = Gemma3Config(
        text_config=TEXT | changes,
        vision_config=VISION,
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    theirs: Any = Gemma3ForConditionalGeneration(config).to(dtype).eval()
    fill(theirs)
    theirs.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return aligned(Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval())


def their_inputs(images: list[Any]) -> Any:
    processor = Gemma3ImageProcessorPil(**PROCESSOR)
    return processor(images=images, return_tensors="pt", input_data_format="channels_last")
