"""The comparison with transformers at start-up, and how its result is told."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_runs import make_cache
from their_sequence import random_ids
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.messages import ParityReport
from shoal.backend.self_test import Subject, run_self_test
from shoal.backend.self_test import test_at_start as start_test
from shoal.backend.weights.loader import load_model

PROMPT = random_ids(20, 128, seed=3)


class Changed:
    """A model with a fault."""

    def __init__(self, model: Any, change: Any) -> None:
        self._model = model
        self._change = change

    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        return self._change(self._model.forward(batch, kv))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), model_type="llama")


def run(folder: Path, change: Any = None, tolerance: float = 0.002, **options: Any) -> ParityReport:
    loaded = load_model(folder, torch.float32)
    model = Changed(loaded.model, change) if change else loaded.model
    subject = Subject(
        model,
        make_cache(loaded.model, **options),
        folder,
        lambda text: PROMPT,
        tolerance,
        torch.float32,
    )
    return run_self_test(subject, 3, lambda *_: None)


def test_a_right_model_passes_bit_for_bit(folder: Path) -> None:
    report = run(folder)
    assert report.ok
    assert (report.num_prompts, report.num_tokens, report.num_equal) == (3, 24, 24)
    assert (report.num_wrong, report.worst_difference, report.detail) == (0, 0.0, "")


def test_a_small_cache_shortens_the_prompts(folder: Path) -> None:
    assert run(folder, num_blocks=3).ok


def test_rounding_passes_within_the_tolerance(folder: Path) -> None:
    report = run(folder, lambda logits: logits * 1.0001)
    assert report.ok
    assert report.num_equal < report.num_tokens
    assert 0 < report.worst_difference < report.tolerance


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.roll(1, dims=-1),
        lambda logits: logits * 1.1,
        lambda logits: logits * float("nan"),
    ],
)
def test_a_wrong_model_fails(folder: Path, change: Any) -> None:
    report = run(folder, change)
    assert report.ok is False
    assert report.worst_difference > report.tolerance


def test_a_model_that_breaks_fails(folder: Path) -> None:
    report = run(folder, lambda logits: logits[:, [9999]])
    assert report.ok is False
    assert "failed" in report.detail


def test_windows_and_shared_tables_pass(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        query_pre_attn_scalar=8,
    )
    report = run(folder)
    assert report.ok
    assert report.num_equal == report.num_tokens


def test_without_transformers_it_does_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    report = run(folder)
    assert report.ok is None
    assert report.detail == "not run: transformers is not installed"


def test_it_runs_only_when_asked_for(folder: Path) -> None:
    loaded = load_model(folder, torch.float32)
    arguments = (loaded.model, make_cache(loaded.model), torch.float32, False, lambda *_: None)
    assert start_test(EngineConfig(str(folder)), *arguments) is None
    report = start_test(EngineConfig(str(folder), self_test=1), *arguments)
    # The checkpoint has no tokenizer: told, not raised.
    assert report is not None
    assert report.ok is False


@pytest.mark.parametrize("value", [-1, 65, True, "3"])
def test_the_number_of_prompts_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="self_test"):
        EngineConfig("x", self_test=value)
