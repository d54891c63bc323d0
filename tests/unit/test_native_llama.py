"""The whole model on the native kernels: close to the reference, and the same bits always."""

from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_reference import GreedyReference, prompt_ids
from paged_runs import make_cache, make_paged_sequence, run_step
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_builder import build_engine, choose_kernels
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.catalogue import kernels_dir
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import NativeLibrary, load_native

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "own_head_dim": {"num_key_value_heads": 2, "head_dim": 24, "vocab_size": 131},
    "odd_sizes": {"hidden_size": 44, "num_attention_heads": 2, "intermediate_size": 51},
}
BLOCKS = (11, 2, 40, 7, 63, 1, 33, 20, 5, 18, 50, 9, 27)


@pytest.fixture(scope="module")
def native() -> NativeLibrary:
    return load_native(kernels_dir())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"], scope="module")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, native: NativeLibrary, dtype: torch.dtype) -> NativeDecoder:
    return NativeDecoder(load_model(smollm2_path, dtype).model, native)


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def alone_at_once(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position, from one prefill of one sequence."""
    sequence = make_paged_sequence(token_ids, BLOCKS)
    return run_step(model, make_cache(model), (sequence, len(token_ids)), all_rows=True)


def in_chunks(model: Any, token_ids: list[int], *sizes: int) -> torch.Tensor:
    sequence, kv = make_paged_sequence(token_ids, BLOCKS), make_cache(model)
    return torch.cat([run_step(model, kv, (sequence, size), all_rows=True) for size in sizes])


def check_closeness(
    checkpoint: Path, token_ids: list[int], logits: torch.Tensor, dtype: torch.dtype
) -> None:
    """In fp32 equal but for the order of sums. In bf16 nearer to fp32 than the reference is, which
    rounds after every op; how near is up to the model."""
    exact = alone_at_once(load_model(checkpoint, torch.float32).model, token_ids)
    if dtype == torch.float32:
        torch.testing.assert_close(logits, exact, rtol=0, atol=2e-3)
        return
    rounded = alone_at_once(load_model(checkpoint, dtype).model, token_ids)
    assert (logits - exact).abs().mean() < (rounded - exact).abs().mean()


def check_invariance(model: Any, splits: range) -> None:
    """One sequence by every way that its logits can come about: the same bits."""
    vocab_size = model.config.vocab_size
    ids = random_ids(45, vocab_size)
    whole = alone_at_once(model, ids)
    for split in splits:
        assert torch.equal(in_chunks(model, ids, split, 45 - split), whole), split
    assert torch.equal(in_chunks(model, ids, 30, *[1] * 15), whole)

    # Beside a prefill and a decode, in the middle of the batch, with blocks of its own.
    kv = make_cache(model)
    before = make_paged_sequence(random_ids(21, vocab_size, 1), range(20, 30))
    after = make_paged_sequence(random_ids(34, vocab_size, 2), range(30, 40))
    ours = make_paged_sequence(ids, range(15))
    run_step(model, kv, (after, 33))
    rows = run_step(model, kv, (before, 21), (ours, 17), (after, 1), all_rows=True)
    assert torch.equal(rows[21:38], whole[:17])
    assert torch.equal(run_step(model, kv, (ours, 28))[0], whole[-1])

    # Preempted: its blocks are lost, and it is computed again into others.
    again = make_paged_sequence(ids, range(44, 60))
    assert torch.equal(run_step(model, kv, (again, 45))[0], whole[-1])

    # Many decodes at once.
    many = [make_paged_sequence(ids, range(idx * 12, idx * 12 + 12)) for idx in range(17)]
    kv = make_cache(model, num_blocks=17 * 12)
    for sequence in many:
        run_step(model, kv, (sequence, 44))
    rows = run_step(model, kv, *((sequence, 1) for sequence in many))
    assert torch.equal(rows, whole[-1].expand(17, -1))

    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.equal(alone_at_once(model, ids), whole)
    torch.set_num_threads(threads)


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
