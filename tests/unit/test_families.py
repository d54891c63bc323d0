"""Every family: logits equal to transformers' alone, and close in a batch; what is refused."""

from pathlib import Path

import pytest
import torch

from shoal.backend.models.registry import FAMILIES
from shoal.backend.weights.loader import load_model
from shoal.load.exactness import measure_alone, measure_batch
from shoal.load.tiny_models import TINY_MODELS, write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_alone_is_bit_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    theirs = write_tiny_model(name, tmp_path, dtype)
    alone = measure_alone(theirs, load_model(tmp_path, dtype), dtype, lengths=(1, 9, 31))
    assert alone.num_equal_rows == alone.num_rows, alone


@pytest.mark.parametrize("name", TINY_MODELS)
def test_ragged_batch_is_close(tmp_path: Path, name: str) -> None:
    """Products of another height round otherwise; nothing else may differ."""
    theirs = write_tiny_model(name, tmp_path, torch.float32)
    assert measure_batch(theirs, load_model(tmp_path, torch.float32), torch.float32) < 1e-4


def test_every_family_is_tried(tmp_path: Path) -> None:
    tried = set()
    for name in TINY_MODELS:
        write_tiny_model(name, tmp_path / name, torch.float32)
        tried.add(load_model(tmp_path / name, torch.float32).config.family)
    assert tried == FAMILIES.keys()
