"""The whole model on the native kernels: close to the reference, and the same bits always."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_reference import GreedyReference, prompt_ids
from native_checks import (
    BLOCKS,
    alone_at_once,
    check_closeness,
    check_invariance,
    in_chunks,
    random_ids,
)
from paged_runs import BLOCK_SIZE, make_cache, make_paged_sequence, run_step
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_builder import build_engine, choose_kernels
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.model_runner import build_forward_batch
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import NativeLibrary
from shoal.kernels.native_plan import OpKind
from shoal.scheduler.outputs import ScheduledSequence

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "own_head_dim": {"num_key_value_heads": 2, "head_dim": 24, "vocab_size": 131},
    "odd_sizes": {"hidden_size": 44, "num_attention_heads": 2, "intermediate_size": 51},
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"], scope="module")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, native: NativeLibrary, dtype: torch.dtype) -> NativeDecoder:
    return NativeDecoder(load_model(smollm2_path, dtype).model, native)


@pytest.mark.parametrize("variant", VARIANTS)
def test_close_to_the_reference(
    tmp_path: Path, native: NativeLibrary, dtype: torch.dtype, variant: str
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", **VARIANTS[variant])
    model = NativeDecoder(load_model(folder, dtype).model, native)
    ids = random_ids(45, model.config.vocab_size)
    check_closeness(folder, ids, in_chunks(model, ids, 40, 1, 1, 3), dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_model_is_invariant(
    tmp_path: Path, native: NativeLibrary, dtype: torch.dtype, variant: str
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", **VARIANTS[variant])
    check_invariance(NativeDecoder(load_model(folder, dtype).model, native), range(1, 45))


@pytest.mark.parametrize("vocab_size", [128, 131])
def test_many_rows_of_logits_equal_few(
    tmp_path: Path, native: NativeLibrary, dtype: torch.dtype, vocab_size: int
) -> None:
    """Many are stored past the caches, where the rows' ends allow it."""
    folder = write_tiny_checkpoint(tmp_path / "tiny", vocab_size=vocab_size)
    model = NativeDecoder(load_model(folder, dtype).model, native)
    ids = random_ids(33, vocab_size)
    kv = make_cache(model)
    many = run_step(model, kv, (make_paged_sequence(ids, BLOCKS), 33), all_rows=True)
    few = make_paged_sequence(ids, BLOCKS)
    for first in range(0, 33, 3):
        rows = run_step(model, kv, (few, 3), all_rows=True)
        assert torch.equal(rows, many[first : first + 3])


def test_spent_logits_are_written_over(tmp_path: Path, native: NativeLibrary) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    model = NativeDecoder(load_model(folder, torch.float32).model, native)
    vocab_size = model.config.vocab_size
    sequence = make_paged_sequence(random_ids(5, vocab_size), BLOCKS)
    batch = build_forward_batch([ScheduledSequence(sequence, 5)], BLOCK_SIZE, model.device)
    kv = make_cache(model)
    expected = model.forward(batch, kv)
    for num_rows, is_enough in ((2, True), (1, True), (0, False)):
        spent = torch.full((num_rows, vocab_size), torch.nan)
        logits = model.forward(replace(batch, spent_logits=spent), kv)
        assert torch.equal(logits, expected)
        assert (logits.data_ptr() == spent.data_ptr()) == is_enough


def test_operations_are_timed(tmp_path: Path, native: NativeLibrary) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    model = NativeDecoder(load_model(folder, torch.float32).model, native)
    model.plan.start_timing()
    in_chunks(model, random_ids(5, model.config.vocab_size), 5)
    times = model.plan.op_times()
    kinds = [op.kind for op in times]
    assert kinds.count(OpKind.ATTENTION) == model.config.num_layers
    (projection,) = (op for op in times if op.kind is OpKind.LOGITS)
    assert projection.n == model.config.vocab_size
    assert all(op.seconds > 0 for op in times if op.kind is OpKind.LINEAR)


def test_real_smollm2_is_invariant(smollm2: NativeDecoder) -> None:
    check_invariance(smollm2, range(1, 45, 11))


def test_real_smollm2_is_as_close_to_exact_as_the_reference(
    smollm2: NativeDecoder, smollm2_path: Path
) -> None:
    prompt = prompt_ids(smollm2_path)[2]
    check_closeness(smollm2_path, prompt, alone_at_once(smollm2, prompt), smollm2.dtype)


def test_greedy_text_equals_transformers(smollm2_path: Path, native: NativeLibrary) -> None:
    model = NativeDecoder(load_model(smollm2_path, torch.float32).model, native)
    prompts = prompt_ids(smollm2_path)[:4]
    sequences = [
        make_paged_sequence(prompt, range(idx * 16, idx * 16 + 16))
        for idx, prompt in enumerate(prompts)
    ]
    kv = make_cache(model, num_blocks=4 * 16)
    for _ in range(16):  # all of them in one batch
        steps = [(sequence, sequence.num_uncomputed_tokens) for sequence in sequences]
        for sequence, row in zip(sequences, run_step(model, kv, *steps), strict=True):
            sequence.token_ids.append(int(row.argmax()))
    reference = GreedyReference(smollm2_path)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.token_ids[len(prompt) :] == reference.generate(prompt, 16)


def test_step_without_samples_returns_no_rows(smollm2: NativeDecoder) -> None:
    sequence = make_paged_sequence(random_ids(9, 1000), BLOCKS)
    logits = run_step(smollm2, make_cache(smollm2), (sequence, 5))
    assert logits.shape == (0, smollm2.config.vocab_size)


def test_bad_token_id_is_refused(smollm2: NativeDecoder) -> None:
    for token_id in (-1, smollm2.config.vocab_size):
        sequence = make_paged_sequence([token_id], BLOCKS)
        with pytest.raises(IndexError, match="token ids"):
            run_step(smollm2, make_cache(smollm2), (sequence, 1))


class TestSelection:
    def test_the_setting_is_checked(self) -> None:
        with pytest.raises(ConfigError, match="kernels must be one of auto, reference, native"):
            EngineConfig(weights="w", kernels="fast")

    @pytest.mark.parametrize(
        ("setting", "expected"),
        [("auto", "native"), ("native", "native"), ("reference", "reference")],
    )
    def test_the_worker_says_which_kernels_run(
        self, tmp_path: Path, setting: str, expected: str
    ) -> None:
        folder = write_tiny_checkpoint(tmp_path / "tiny")
        config = EngineConfig(
            weights=str(folder), kernels=setting, device="cpu", num_kv_blocks=16, num_threads=1
        )
        phases: list[str] = []
        _, ready = build_engine(config, lambda phase, done, total: phases.append(phase))
        assert ready.kernels == expected
        assert ("packing weights" in phases) == (expected == "native")

    def test_falling_back_is_said_in_the_log(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        cpu = torch.device("cpu")
        assert choose_kernels("auto", cpu, lambda *_: None) is None
        assert "torch reference" in caplog.text
        assert "no-such-compiler" in caplog.text
        with pytest.raises(ConfigError, match="no-such-compiler"):
            choose_kernels("native", cpu, lambda *_: None)

    def test_other_devices_keep_the_reference(self) -> None:
        device = torch.device("meta")
        assert choose_kernels("auto", device, lambda *_: None) is None
        with pytest.raises(ConfigError, match="CPU only"):
            choose_kernels("native", device, lambda *_: None)
