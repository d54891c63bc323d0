"""The forward pass equals transformers' bit for bit (attn_implementation sdpa, its default)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_reference import prompt_ids
from paged_runs import make_cache, make_paged_sequence, run_step
from their_sequence import TheirSequence
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers import LlamaForCausalLM as TransformersLlama

from shoal.backend.models.decoder import Decoder
from shoal.backend.weights.loader import load_model
from shoal.load.tiny_models import aligned

# The argument is named otherwise only in the newest versions.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

# Scattered and out of order: a sequence's blocks are wherever there was room.
BLOCKS = (11, 2, 40, 7, 63, 1, 33, 20, 5, 18, 50, 9, 27)

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {"num_key_value_heads": 2},
    "mha": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "own_head_dim": {"num_key_value_heads": 2, "head_dim": 24},
    "rope_linear": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "rope_llama3": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            # Low enough that all three ranges of wavelengths occur in a small head.
            "original_max_position_embeddings": 64,
        },
    },
}


@dataclass(frozen=True)
class Pair:
    """One checkpoint, loaded by transformers and by us."""

    theirs: Any
    ours: Decoder


def make_pair(folder: Path, dtype: torch.dtype, **overrides: Any) -> Pair:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        **overrides,
    )
    theirs = TransformersLlama(config).to(dtype).eval()
    for parameter in theirs.parameters():
        # Norm weights of one and biases of zero would hide mistakes.
        torch.nn.init.normal_(parameter, mean=0.05, std=0.2)
    theirs.save_pretrained(folder)
    theirs = aligned(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    assert theirs.config._attn_implementation == "sdpa"
    return Pair(theirs, load_model(folder, dtype).model)


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 17, 31])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_then_decode_is_bit_exact(
    tmp_path: Path, dtype: torch.dtype, variant: str, num_prompt_tokens: int
) -> None:
    pair = make_pair(tmp_path, dtype, **VARIANTS[variant])
    prompt = random_ids(num_prompt_tokens, 320, seed=num_prompt_tokens)
    sequence = make_paged_sequence(prompt, BLOCKS)
    kv = make_cache(pair.ours)
    theirs = TheirSequence(pair.theirs)

    expected = theirs.feed(prompt)
    logits = run_step(pair.ours, kv, (sequence, len(prompt)), all_rows=True)
    assert torch.equal(logits, expected)
    for _ in range(18):
        token = int(expected[-1].argmax())
        sequence.token_ids.append(token)
        expected = theirs.feed([token])
        assert torch.equal(run_step(pair.ours, kv, (sequence, 1)), expected)


@pytest.mark.parametrize("variant", ["gqa", "mha", "tied"])
def test_sampled_row_of_a_prefill_is_bit_exact(
    tmp_path: Path, dtype: torch.dtype, variant: str
) -> None:
    pair = make_pair(tmp_path, dtype, **VARIANTS[variant])
    prompt = random_ids(29, 320, seed=3)
    sequence = make_paged_sequence(prompt, BLOCKS)
    logits = run_step(pair.ours, make_cache(pair.ours), (sequence, len(prompt)))
    assert torch.equal(logits, TheirSequence(pair.theirs).feed(prompt, logits_to_keep=1))


@pytest.mark.parametrize("chunk", [1, 3, 8, 25])
def test_chunked_prefill_matches_whole_prefill(tmp_path: Path, chunk: int) -> None:
    pair = make_pair(tmp_path, torch.float32, **VARIANTS["gqa"])
    prompt = random_ids(41, 320, seed=4)
    expected = TheirSequence(pair.theirs).feed(prompt)
    sequence = make_paged_sequence(prompt, BLOCKS)
    kv = make_cache(pair.ours)
    rows = []
    while sequence.num_uncomputed_tokens:
        num_tokens = min(chunk, sequence.num_uncomputed_tokens)
        rows.append(run_step(pair.ours, kv, (sequence, num_tokens), all_rows=True))
    logits = torch.cat(rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_mixed_batch_matches_each_sequence_alone(tmp_path: Path) -> None:
    """A decode, a whole prefill and a chunk in one step."""
    pair = make_pair(tmp_path, torch.float32, **VARIANTS["gqa"])
    kv = make_cache(pair.ours)
    prompts = [random_ids(count, 320, seed=count) for count in (9, 14, 20)]
    decoding = make_paged_sequence(prompts[0], (3, 8, 1))
    whole = make_paged_sequence(prompts[1], (20, 4, 30, 2))
    chunked = make_paged_sequence(prompts[2], (50, 6, 12, 9, 7))
    run_step(pair.ours, kv, (decoding, 8))
    run_step(pair.ours, kv, (chunked, 10))
    logits = run_step(pair.ours, kv, (decoding, 1), (whole, 14), (chunked, 10))
    for row, prompt in zip(logits, prompts, strict=True):
        expected = TheirSequence(pair.theirs).feed(prompt)[-1]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
        assert int(row.argmax()) == int(expected.argmax())


def test_step_without_samples_returns_no_rows(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, torch.float32, **VARIANTS["gqa"])
    sequence = make_paged_sequence(random_ids(9, 320, seed=1), BLOCKS)
    logits = run_step(pair.ours, make_cache(pair.ours), (sequence, 5))
    assert logits.shape == (0, 320)
    assert logits.dtype == torch.float32


def test_neighbour_with_nan_keys_changes_nothing(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, torch.float32, **VARIANTS["gqa"])
    prompt = random_ids(10, 320, seed=6)

    def logits_beside_neighbour(poison: bool) -> torch.Tensor:
        kv = make_cache(pair.ours, fill=0.0)
        sequence = make_paged_sequence(prompt, (1, 2, 3))
        neighbour = make_paged_sequence(prompt, (4, 5, 6))
        run_step(pair.ours, kv, (sequence, 9), (neighbour, 9))
        if poison:
            kv.keys(0)[4].fill_(float("nan"))
        return run_step(pair.ours, kv, (sequence, 1), (neighbour, 1))

    clean, poisoned = logits_beside_neighbour(False), logits_beside_neighbour(True)
    assert torch.equal(clean[0], poisoned[0])
    assert bool(poisoned[1].isnan().all())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Pair:
    theirs = AutoModelForCausalLM.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    return Pair(theirs, load_model(smollm2_path, torch.float32).model)


@pytest.mark.parametrize("prompt_idx", [0, 2, 12])
def test_real_smollm2_is_bit_exact(smollm2: Pair, smollm2_path: Path, prompt_idx: int) -> None:
    prompt = prompt_ids(smollm2_path)[prompt_idx]
    sequence = make_paged_sequence(prompt, BLOCKS)
    kv = make_cache(smollm2.ours)
    theirs = TheirSequence(smollm2.theirs)
    expected = theirs.feed(prompt)
    logits = run_step(smollm2.ours, kv, (sequence, len(prompt)), all_rows=True)
    assert torch.equal(logits, expected)
    for _ in range(16):
        token = int(expected[-1].argmax())
        sequence.token_ids.append(token)
        expected = theirs.feed([token])
        assert torch.equal(run_step(smollm2.ours, kv, (sequence, 1)), expected)


def test_real_smollm2_weights_equal_transformers(smollm2: Pair, smollm2_path: Path) -> None:
    """Dequantised and with Q and K put back in order: layer by layer the same numbers."""
    state = smollm2.theirs.state_dict()
    layer = smollm2.ours._layers[7]
    prefix = "model.layers.7."
    for name, linear in (
        ("self_attn.q_proj", layer.attention.q_proj),
        ("self_attn.k_proj", layer.attention.k_proj),
        ("self_attn.v_proj", layer.attention.v_proj),
        ("mlp.down_proj", layer.mlp.down),
    ):
        assert torch.equal(linear.weight, state[f"{prefix}{name}.weight"])
