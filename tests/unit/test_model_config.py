"""Reading and refusing model configs."""

import math
from typing import Any

import pytest

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.registry import config_from_gguf, config_from_hf

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 100,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_hf_and_gguf_give_the_same_config() -> None:
    hf = config_from_hf(HF)
    gguf = config_from_gguf(GGUF, {"output.weight"})
    assert hf == gguf
    assert (hf.head_dim, hf.num_kv_heads, hf.eos_token_ids) == (8, 2, (2,))


def test_left_out_values_take_the_defaults_of_transformers() -> None:
    names = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "bos_token_id")
    config = config_from_hf({name: HF[name] for name in HF if name not in names})
    assert (config.num_kv_heads, config.max_position_embeddings) == (4, 2048)
    assert (config.rms_norm_eps, config.bos_token_id) == (1e-6, None)


@pytest.mark.parametrize(
    ("model", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, 3, (2, 3)),
        ([2, 5], [5, 7], (2, 5, 7)),
        (None, [4], (4,)),
        (None, None, ()),
    ],
)
def test_eos_ids_of_both_configs_count(
    model: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    config = config_from_hf(HF | {"eos_token_id": model}, {"eos_token_id": generation})
    assert config.eos_token_ids == expected


def test_gguf_end_of_turn_is_an_eos() -> None:
    config = config_from_gguf(GGUF | {"tokenizer.ggml.eot_token_id": 9}, set())
    assert config.eos_token_ids == (2, 9)


def test_gguf_tensors_tell_ties_and_biases() -> None:
    config = config_from_gguf(GGUF, {"blk.0.attn_q.bias"})
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (
        True,
        True,
        False,
    )


def test_gguf_vocabulary_may_be_told_by_the_tokens() -> None:
    values = {name: value for name, value in GGUF.items() if name != "llama.vocab_size"}
    assert config_from_gguf(values | {"tokenizer.ggml.tokens": ["a"] * 50}, ()).vocab_size == 50


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_rope_of_old_and_new_configs(where: str) -> None:
    theta = {"rope_theta": 500000.0}
    values = (
        {where: LLAMA3_ROPE} | theta if where == "rope_scaling" else {where: LLAMA3_ROPE | theta}
    )
    rope = config_from_hf(HF | values).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 500000.0, 8.0)
    assert rope.original_max_positions == 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": None}, "architectures"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 33}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"eos_token_id": 100}, "eos_token_id"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_parameters"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_bad_hf_config_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_hf(HF | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"general.architecture": None}, "general.architecture"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.expert_count": 8}, "llama.expert_used_count"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "num_experts_per_tok"),
        ({"split.count": 2}, "split.count"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"tokenizer.ggml.eos_token_id": 100}, "eos_token_id"),
    ],
)
def test_bad_gguf_metadata_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_gguf(GGUF | change, set())


def test_rope_factors_must_fit_the_head() -> None:
    rope = config_from_gguf(GGUF, (), (1.0, 1.0, 8.0, 8.0)).layers[0].rope
    assert rope is not None
    assert rope.kind == "factors"
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight must hold 4"):
        config_from_gguf(GGUF, (), (1.0,))
