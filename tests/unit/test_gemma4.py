"""Gemma 4's forward pass equals transformers' bit for bit, for each form the family comes in."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_sampling
from gemma4_forms import SMALL, VARIANTS, WINDOW, fill
from paged_runs import BLOCK_SIZE, make_cache, make_paged_sequence, run_step
from their_sequence import TheirSequence, random_ids, their_greedy
from tiny_runs import generate
from transformers import (
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)
from transformers import Gemma4ForCausalLM as TheirGemma4

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.gemma4 import Gemma4ForCausalLM
from shoal.backend.models.registry import config_from_hf
from shoal.backend.weights.loader import LoadedModel, load_model
from shoal.load.tiny_models import aligned
from shoal.scheduler.eviction import make_eviction_policy
from shoal.scheduler.sequence import Sequence

# The argument is named otherwise only in the newest versions.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

# Scattered and out of order. Block 0 of the sliding layers is what freed entries name.
BLOCKS = (
    (11, 2, 40, 7, 63, 1, 33, 20, 5, 18, 50, 9, 27),
    (3, 8, 1, 60, 22, 4, 17, 31, 2, 44, 6, 29, 13),
)


@dataclass(frozen=True)
class Pair:
    """One checkpoint, loaded by transformers and by us."""

    theirs: Any
    ours: Gemma4ForCausalLM


def make_pair(folder: Path, dtype: torch.dtype, **overrides: Any) -> Pair:
    theirs: Any = TheirGemma4(Gemma4TextConfig(**SMALL | overrides)).to(dtype).eval()
    fill(theirs)
    theirs.save_pretrained(folder)
    theirs = aligned(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())
    assert theirs.config._attn_implementation == "sdpa"
    ours = load_model(folder, dtype).model
    assert isinstance(ours, Gemma4ForCausalLM)
    return Pair(theirs, ours)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> "Pairs":
    """Pairs by variant and dtype, each made once."""

    @functools.cache
    def make(variant: str, dtype: torch.dtype) -> Pair:
        return make_pair(tmp_path_factory.mktemp(variant), dtype, **VARIANTS[variant])

    return make


Pairs = Callable[[str, torch.dtype], Pair]


def free_behind_window(sequence: Any) -> None:
    """What the cache manager does to the sliding layers' table."""
    first_seen = sequence.num_computed_tokens - WINDOW + 1
    for idx in range(max(0, first_seen // BLOCK_SIZE)):
        sequence.block_tables[1][idx] = 0


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("split", [[1], [31], [5, 9, 1, 8, 12]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_then_decode_is_bit_exact(
    pairs: Pairs, dtype: torch.dtype, variant: str, split: list[int]
) -> None:
    pair = pairs(variant, dtype)
    sequence = make_paged_sequence(random_ids(sum(split), 320, seed=1), *BLOCKS)
    kv = make_cache(pair.ours)
    theirs = TheirSequence(pair.theirs)
    for num_tokens in split:
        start = sequence.num_computed_tokens
        expected = theirs.feed(sequence.token_ids[start : start + num_tokens])
        free_behind_window(sequence)
        logits = run_step(pair.ours, kv, (sequence, num_tokens), all_rows=True)
        assert torch.equal(logits, expected)
    for _ in range(12):
        token = int(expected[-1].argmax())
        sequence.token_ids.append(token)
        expected = theirs.feed([token])
        free_behind_window(sequence)
        assert torch.equal(run_step(pair.ours, kv, (sequence, 1)), expected)


@pytest.mark.parametrize("variant", ["e2b", "e4b", "26b_a4b"])
def test_sampled_row_of_a_prefill_is_bit_exact(
    pairs: Pairs, dtype: torch.dtype, variant: str
) -> None:
    """Layers without keys of their own run on the sampled rows alone, as in transformers."""
    pair = pairs(variant, dtype)
    prompt = random_ids(29, 320, seed=3)
    sequence = make_paged_sequence(prompt, *BLOCKS)
    kv = make_cache(pair.ours)
    theirs = TheirSequence(pair.theirs)
    theirs.feed(prompt[:13], logits_to_keep=1)
    assert run_step(pair.ours, kv, (sequence, 13)).shape == (0, 320)
    logits = run_step(pair.ours, kv, (sequence, 16))
    assert torch.equal(logits, theirs.feed(prompt[13:], logits_to_keep=1))


@pytest.mark.parametrize("variant", ["e2b", "31b", "26b_a4b"])
def test_ragged_batch_matches_each_sequence_alone(pairs: Pairs, variant: str) -> None:
    """Products of other heights round otherwise; nothing else may differ."""
    pair = pairs(variant, torch.float32)
    kv = make_cache(pair.ours)
    lengths = [1, 3, 8, 9, 14, 17, 22, 30]
    steps, firsts = [], []
    blocks = iter(range(1, 64))
    for length in lengths:
        table = [next(blocks) for _ in range(-(-length // BLOCK_SIZE))]
        sequence = make_paged_sequence(random_ids(length, 320, seed=length), table, table)
        first = [0, 2, 7, 0, 5, 16, 12, 0][lengths.index(length)]
        steps.append((sequence, length - first))
        firsts.append((sequence, first))
    run_step(pair.ours, kv, *[step for step in firsts if step[1]])
    logits = run_step(pair.ours, kv, *steps)
    for row, (sequence, _) in zip(logits, steps, strict=True):
        expected = TheirSequence(pair.theirs).feed(sequence.token_ids)[-1]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
        assert int(row.argmax()) == int(expected.argmax())


@pytest.mark.parametrize("variant", ["e2b", "26b_a4b"])
def test_prefix_cache_and_preemption_keep_the_text(pairs: Pairs, variant: str) -> None:
    pair = pairs(variant, torch.float32)
    shared = random_ids(13, 320, seed=9)
    prompts = [shared + random_ids(5 + idx, 320, seed=idx) for idx in range(4)]
    sampling = make_sampling(temperature=0.0, max_tokens=12)
    sequences = [Sequence(idx, list(ids), len(ids), sampling) for idx, ids in enumerate(prompts)]
    result = generate(
        LoadedModel(pair.ours, pair.ours.config),
        sequences,
        num_blocks=20,
        prefix_eviction=make_eviction_policy("lru", 20),
        windows=[(WINDOW, 64)],
    )
    expected = [their_greedy(pair.theirs, prompt, 12) for prompt in prompts]
    assert result.texts == dict(enumerate(expected))
    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert sum(sequence.num_cached_tokens for sequence in sequences) > 0


def test_text_of_a_model_that_sees_images(tmp_path: Path, dtype: torch.dtype) -> None:
    """The same text pass under the names and the nested config of the whole model."""
    text = SMALL | VARIANTS["e2b"] | {"eos_token_id": [1, 7]}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 16,
    }
    tokens = {"image_token_id": 300, "boi_token_id": 301, "eoi_token_id": 302}
    tokens |= {"audio_token_id": 303, "video_token_id": 304}
    config = Gemma4Config(text_config=text, vision_config=vision, **tokens)
    theirs: Any = Gemma4ForConditionalGeneration(config).to(dtype).eval()
    fill(theirs)
    theirs.save_pretrained(tmp_path)
    theirs = aligned(Gemma4ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype).eval())
    loaded = load_model(tmp_path, dtype)
    assert loaded.config.eos_token_ids == (1, 7)
    sequence = make_paged_sequence(random_ids(19, 300, seed=5), *BLOCKS)
    kv = make_cache(loaded.model)
    expected = TheirSequence(theirs).feed(sequence.token_ids)
    assert torch.equal(run_step(loaded.model, kv, (sequence, 19), all_rows=True), expected)


def test_released_and_rewritten_configs_mean_the_same() -> None:
    """transformers writes what differs between layers layer by layer; releases name it."""
    values = SMALL | VARIANTS["31b"]
    rewritten = json.loads(Gemma4TextConfig(**values).to_json_string())
    assert "global_head_dim" not in rewritten
    rewritten["architectures"] = values["architectures"]
    released = config_from_hf(values | {"eos_token_id": 1, "bos_token_id": 2})
    assert config_from_hf(rewritten) == released


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"global_head_dim": 31}, "head_dim"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"per_layer_config": {"2": {"hidden_size": 12}}}, "per_layer_config"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_config_refuses(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_hf(SMALL | overrides)
