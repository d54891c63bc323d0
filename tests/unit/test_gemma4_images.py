"""Images in Gemma 4: the encoder, the merge and the masks equal transformers' bit for bit."""

from pathlib import Path

import pytest
import torch
from gemma4_pictures import (
    IMAGE,
    interleave,
    make_checkpoint,
    make_images,
    our_logits,
    their_features,
)
from paged_runs import make_cache, make_paged_sequence

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.gemma4_vision import Gemma4Vision, load_gemma4_vision
from shoal.backend.weights.loader import load_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("variant", "count"), [("e2b", 1), ("e4b", 3), ("31b", 2), ("26b_a4b", 3)])
def test_text_and_images_equal_transformers(
    tmp_path: Path, dtype: torch.dtype, variant: str, count: int
) -> None:
    theirs = make_checkpoint(tmp_path, dtype, variant)
    loaded, vision = load_model(tmp_path, dtype), load_gemma4_vision(tmp_path, dtype)
    expected_features, features = [], []
    for image in make_images(count):
        encoded = their_features(theirs, image)
        expected_features += encoded.pooler_output
        features.append(vision.encode(image))
        assert torch.equal(features[-1], expected_features[-1])
    ids = interleave([len(embeddings) for embeddings in features])
    encoded.pooler_output = tuple(expected_features)
    is_image = torch.tensor([ids]) == IMAGE
    with torch.inference_mode():
        output = theirs(
            torch.tensor([ids]),
            mm_encoder_outputs={"image": encoded},
            mm_token_type_ids=is_image.long(),
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


def test_an_image_is_encoded_alike_beside_others(tmp_path: Path) -> None:
    """The encoder sees one image at a time, so its embeddings can be kept by the pixels' digest."""
    make_checkpoint(tmp_path, torch.float32, "e2b")
    vision: Gemma4Vision = load_gemma4_vision(tmp_path, torch.float32)
    first, second = make_images(2)
    alone = vision.encode(first)
    vision.encode(second)
    assert torch.equal(vision.encode(first.copy()), alone)
    assert not torch.equal(vision.encode(255 - first), alone)


def test_a_checkpoint_without_its_encoder_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, torch.float32, "e2b")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.vision_tower.patch_embedder.input_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="image encoder does not fit.*input_proj"):
        load_gemma4_vision(tmp_path, torch.float32)


def test_images_attend_both_ways_matters(tmp_path: Path) -> None:
    """What an image's first token sees of its last one."""
    make_checkpoint(tmp_path, torch.float32, "31b")
    loaded = load_model(tmp_path, torch.float32)
    vision = load_gemma4_vision(tmp_path, torch.float32)
    embeddings = vision.encode(make_images(1)[0])
    ids = interleave([len(embeddings)])
    changed = embeddings.clone()
    changed[-1] += 1.0
    first_row = ids.index(IMAGE)
    rows = []
    for features in (embeddings, changed):
        sequence = make_paged_sequence(ids, list(range(1, 60)), list(range(1, 60)))
        logits = our_logits(loaded, make_cache(loaded.model), sequence, len(ids), features)
        rows.append(logits)
    assert torch.equal(rows[0][first_row - 1], rows[1][first_row - 1])
    assert not torch.equal(rows[0][first_row], rows[1][first_row])
