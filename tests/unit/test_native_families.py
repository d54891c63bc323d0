"""Every family on the native kernels: close to the reference, and the same bits always."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gemma4_forms import SMALL, VARIANTS, fill
from native_checks import alone_at_once, check_closeness, check_invariance, in_chunks, random_ids

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.messages import WorkerReady
from shoal.backend.models.native import make_native, missing_ops
from shoal.backend.runners import find_weights
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import NativeLibrary
from shoal.load.tiny_models import TINY_MODELS, write_tiny_model

# Llama's variants are tried in test_native_llama.
FAMILIES = [name for name in TINY_MODELS if not name.startswith(("Llama", "SmolLM2"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_close_and_invariant(
    tmp_path: Path, native: NativeLibrary, name: str, dtype: torch.dtype
) -> None:
    write_tiny_model(name, tmp_path, dtype)
    loaded = load_model(tmp_path, dtype)
    assert missing_ops(loaded.config) is None
    model = make_native(loaded.model, native)
    ids = random_ids(45, model.config.vocab_size)
    check_closeness(tmp_path, ids, in_chunks(model, ids, 40, 1, 1, 3), dtype)
    check_invariance(model, range(4, 45, 8))


@pytest.mark.parametrize("form", ["wide_heads", "untied"])
def test_other_forms_of_gemma4(tmp_path: Path, native: NativeLibrary, form: str) -> None:
    """Heads of 512; biases, an output projection of its own, logits without a cap."""
    theirs = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SMALL | VARIANTS[form]))
    fill(theirs)
    theirs.save_pretrained(tmp_path)
    model = make_native(load_model(tmp_path, torch.float32).model, native)
    ids = random_ids(45, model.config.vocab_size)
    logits = in_chunks(model, ids, 40, 1, 1, 3)
    assert torch.equal(logits, alone_at_once(model, ids))
    check_closeness(tmp_path, ids, logits, torch.float32)


def test_packed_experts_stay_packed(tmp_path: Path) -> None:
    """The native kernels would need them dense."""
    write_tiny_model("Qwen3-MoE", tmp_path, torch.float32)
    found = find_weights(EngineConfig(str(tmp_path)))
    assert found.missing_ops("none") is None
    assert found.missing_ops("int8") == "products with packed experts"
    loaded = load_model(tmp_path, torch.float32, quantization="int8")
    ids = random_ids(20, loaded.config.vocab_size)
    exact = alone_at_once(load_model(tmp_path, torch.float32).model, ids)
    # Eight bits may tip the choice between two experts of near-equal weight.
    assert (alone_at_once(loaded.model, ids) - exact).abs().mean() < 0.5 * exact.std()


class TestWhatTheNativeKernelsLack:
    """Known before the weights are loaded, as their dtype depends on who computes."""

    def test_the_reference_runs_it_in_float32(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_tiny_model("Qwen3-MoE", tmp_path, torch.float32)
        ready = build(tmp_path, quantization="int8")
        assert (ready.kernels, ready.dtype) == ("reference", "float32")
        assert "products with packed experts" in caplog.text

    def test_what_transformers_runs_is_float32_too(self, tmp_path: Path) -> None:
        write_tiny_model("Qwen 3", tmp_path, torch.float32)
        ready = build(tmp_path, runner="transformers")
        assert (ready.kernels, ready.dtype) == ("reference", "float32")

    def test_native_alone_is_refused(self, tmp_path: Path) -> None:
        write_tiny_model("Qwen3-MoE", tmp_path, torch.float32)
        with pytest.raises(ConfigError, match="packed experts"):
            build(tmp_path, quantization="int8", kernels="native")


def test_gemma4_is_served_natively(tmp_path: Path, native: NativeLibrary) -> None:
    write_tiny_model("Gemma 4 (E2B)", tmp_path, torch.float32)
    ready = build(tmp_path)
    assert ready.kernels == "native"
    assert ready.dtype == ("bfloat16" if native.has_bf16 else "float32")


def build(folder: Path, **settings: Any) -> WorkerReady:
    config = EngineConfig(str(folder), device="cpu", num_kv_blocks=64, num_threads=1, **settings)
    return build_engine(config, lambda phase, done, total: None)[1]
