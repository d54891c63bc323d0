"""Images in Gemma 3: the encoder, the merge and the masks equal transformers' bit for bit."""

from pathlib import Path

import pytest
import torch
from gemma3_pictures import TOKENS_PER_IMAGE, make_gemma3_checkpoint, their_inputs
from gemma4_pictures import IMAGE, interleave, make_images, our_logits
from paged_runs import make_cache, make_paged_sequence
from safetensors.torch import load_file, save_file

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.gemma3_vision import load_gemma3_vision
from shoal.backend.weights.loader import load_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 3])
def test_text_and_images_equal_transformers(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    theirs = make_gemma3_checkpoint(tmp_path, dtype)
    loaded, vision = load_model(tmp_path, dtype), load_gemma3_vision(tmp_path, dtype)
    features = []
    for image in make_images(count):
        features.append(vision.encode(image))
        with torch.inference_mode():
            pixel_values = their_inputs([image])["pixel_values"].to(dtype)
            encoded = theirs.get_image_features(pixel_values, return_dict=True)
        assert torch.equal(features[-1], encoded.pooler_output[0])
    ids = interleave([TOKENS_PER_IMAGE] * count)
    encoded.pooler_output = torch.stack(features)
    with torch.inference_mode():
        output = theirs(
            torch.tensor([ids]),
            mm_encoder_outputs={"image": encoded},
            token_type_ids=(torch.tensor([ids]) == IMAGE).long(),
            use_cache=True,
        )
    tables = [list(range(1, 60)), list(range(59, 0, -1))]
    sequence, kv = make_paged_sequence(ids, *tables), make_cache(loaded.model)
    logits = our_logits(loaded, kv, sequence, len(ids), torch.cat(features))
    assert torch.equal(logits, output.logits[0].float())
    for _ in range(4):
        token = int(logits[-1].argmax())
        sequence.token_ids.append(token)
        with torch.inference_mode():
            output = theirs(torch.tensor([[token]]), cache=output.cache, use_cache=True)
        logits = our_logits(loaded, kv, sequence, 1, None)
        assert torch.equal(logits, output.logits[0].float())


def test_released_names_and_a_missing_tensor(tmp_path: Path) -> None:
    """Releases have one more part in the tower's names."""
    make_gemma3_checkpoint(tmp_path, torch.float32)
    pixels = make_images(1)[0]
    before = load_gemma3_vision(tmp_path, torch.float32).encode(pixels)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(load_gemma3_vision(tmp_path, torch.float32).encode(pixels), before)
    assert load_model(tmp_path, torch.float32).config.image_token_id == IMAGE
    del renamed["multi_modal_projector.mm_input_projection_weight"]
    save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="image encoder does not fit.*mm_input_projection"):
        load_gemma3_vision(tmp_path, torch.float32)
