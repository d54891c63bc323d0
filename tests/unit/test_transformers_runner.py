"""Models of families not written here, through transformers over our paged cache."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import make_sampling
from paged_runs import make_cache, make_paged_sequence, run_step
from safetensors.torch import save_file
from their_sequence import TheirSequence, random_ids, their_greedy
from tiny_checkpoint import write_tiny_checkpoint
from tiny_runs import generate

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.transformers_model import TransformersModel, load_through_transformers
from shoal.backend.runners import ServedWeights, find_weights, load_with_runner
from shoal.scheduler.eviction import make_eviction_policy
from shoal.scheduler.sequence import Sequence

# The argument is named otherwise only in the newest versions.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

BLOCKS = (11, 2, 40, 7, 63, 1, 33, 20, 5, 18, 50, 9, 27)
VOCAB_SIZE = 320
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 8},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.1},
    "gpt_neox": {},
    "stablelm": {},
    "cohere2": {"sliding_window": 8, "num_hidden_layers": 4},  # sliding and full layers
    "gemma2": {"sliding_window": 8, "head_dim": 16},  # the same, and capped scores
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},  # learned positions
}


def make_checkpoint(folder: Path, name: str, **overrides: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SMALL | FAMILIES.get(name, {}) | overrides)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.02, std=0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, runner: str = "auto", **settings: Any) -> ServedWeights:
    config = EngineConfig(str(folder), runner=runner, **settings)
    found = find_weights(config)
    return load_with_runner(config, found, torch.float32, torch.device("cpu"), lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_chunks_and_decode_are_bit_exact(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    make_checkpoint(tmp_path, name)
    ours = load_through_transformers(tmp_path, dtype)
    eager = "eager" if name == "gemma2" else "sdpa"
    theirs = TheirSequence(
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, attn_implementation=eager
        ).eval()
    )
    sequence = make_paged_sequence(random_ids(30, VOCAB_SIZE, seed=1), BLOCKS)
    kv = make_cache(ours)
    for num_tokens in (17, 9, 1, 3):
        start = sequence.num_computed_tokens
        expected = theirs.feed(sequence.token_ids[start : start + num_tokens])
        logits = run_step(ours, kv, (sequence, num_tokens), all_rows=True)
        assert torch.equal(logits, expected)
    for _ in range(8):
        sequence.token_ids.append(int(expected[-1].argmax()))
        expected = theirs.feed(sequence.token_ids[-1:])
        assert torch.equal(run_step(ours, kv, (sequence, 1)), expected)


@pytest.mark.parametrize("name", ["phi3", "cohere2", "gpt2"])
def test_ragged_batch_matches_each_sequence_alone(tmp_path: Path, name: str) -> None:
    ours = load_through_transformers(make_checkpoint(tmp_path, name), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    kv = make_cache(ours)
    blocks = iter(range(1, 64))
    steps = []
    for length in (1, 3, 8, 9, 14, 17, 22, 30):
        table = [next(blocks) for _ in range(-(-length // 4))]
        steps.append((make_paged_sequence(random_ids(length, VOCAB_SIZE, length), table), length))
    logits = run_step(ours, kv, *steps)
    for row, (sequence, _) in zip(logits, steps, strict=True):
        expected = TheirSequence(theirs).feed(sequence.token_ids)[-1]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
        assert int(row.argmax()) == int(expected.argmax())


@pytest.mark.parametrize("name", ["olmo2", "cohere2"])
def test_engine_with_prefix_cache_and_preemption(tmp_path: Path, name: str) -> None:
    """Texts are those of transformers' own greedy search, with much memory and with little."""
    loaded = load(make_checkpoint(tmp_path, name))
    assert loaded.runner == "transformers"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    shared = random_ids(13, VOCAB_SIZE, seed=9)
    prompts = [shared + random_ids(5 + idx, VOCAB_SIZE, seed=idx) for idx in range(4)]

    def sequences() -> list[Sequence]:
        sampling = make_sampling(temperature=0.0, max_tokens=12)
        return [Sequence(idx, list(p), len(p), sampling) for idx, p in enumerate(prompts)]

    expected = {idx: their_greedy(theirs, prompt, 12) for idx, prompt in enumerate(prompts)}
    windows = [(window, 64) for window in loaded.config.kv_layout.windows]
    roomy = generate(loaded, sequences(), num_blocks=64, windows=windows)
    assert roomy.texts == expected
    tight = sequences()
    policy = make_eviction_policy("lru", 20)
    result = generate(loaded, tight, num_blocks=20, prefix_eviction=policy, windows=windows)
    assert result.texts == expected
    assert sum(sequence.num_preemptions for sequence in tight) > 0
    assert sum(sequence.num_cached_tokens for sequence in tight) > 0


def test_auto_prefers_our_own(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, model_type="llama")
    assert isinstance(load(tmp_path).model, Decoder)
    loaded = load(tmp_path, "transformers")
    assert isinstance(loaded.model, TransformersModel)
    assert loaded.config.eos_token_ids == (2,)


def test_custom_refuses_what_it_has_not(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo2")
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM.*Supported: LlamaForCausalLM"):
        load(tmp_path, "custom")


def test_quantization_needs_our_own(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo2")
    with pytest.raises(ConfigError, match="quantization: int8 needs the runner custom"):
        load(tmp_path, quantization="int8")


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("mamba", {}, "linear_attention"),
        ("falcon_h1", {}, "layers of the kind"),
        ("falcon", {}, "attention cannot be replaced"),
        ("gptj", {}, "attention cannot be replaced"),
        ("bloom", {}, "positions"),
        ("bert", {}, "not causal"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, "s_aux"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "longest sequence"),
    ],
)
def test_refusals_give_the_reason(
    tmp_path: Path, name: str, overrides: dict[str, Any], reason: str
) -> None:
    if name == "phi3":
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
        overrides = {"rope_parameters": overrides["rope_parameters"] | factors}
        overrides["original_max_position_embeddings"] = 256
    make_checkpoint(tmp_path, name, **overrides)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert reason in message
    assert "Supported: LlamaForCausalLM" in message  # what our own runner can
    assert "What can: decoder-only models" in message


def write_config(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["T5ForConditionalGeneration"], model_type="t5")
    with pytest.raises(ConfigError, match="encoder-decoder"):
        load(tmp_path)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    write_config(
        tmp_path,
        architectures=["EvilForCausalLM"],
        model_type="evil",
        auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"},
    )
    with pytest.raises(ConfigError, match="code that comes with the checkpoint"):
        load(tmp_path)


def test_without_transformers_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "olmo2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install 'transformers>=5'"):
        load(tmp_path)
