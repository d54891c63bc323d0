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

GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"]}
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
        ({"eos_token_id": [[2]]}, "eos_token_id"),
        ({"eos_token_id": {}}, "eos_token_id"),
        ({"head_dim": [8]}, "head_dim"),
        ({"num_key_value_heads": {}}, "num_kv_heads"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"rope_parameters": {"rope_type": []}}, "rope type"),
        ({"rope_theta": 10**400}, "rope theta"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"architectures": [[[]] * 1000]}, "architecture"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 1}}, "rope_parameters"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": []}}, "rope_parameters"),
        (GEMMA3 | {"rope_scaling": [1]}, "rope_scaling"),
        (SMOLLM3 | {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        (SMOLLM3 | {"no_rope_layer_interval": "4"}, "no_rope_layer_interval"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, "mlp_only_layers"),
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
    with pytest.raises(ConfigError, match=named) as caught:
        config_from_hf(HF | change)
    assert len(str(caught.value)) < 400


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


FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
}


def family_config(name: str, **changes: Any) -> Any:
    return config_from_hf(HF | FAMILY_CONFIGS[name] | changes)


def test_layers_as_the_families_have_them_by_default() -> None:
    rotated = [layer.rope is not None for layer in family_config("smollm3").layers]
    assert rotated == [True, True, True, False]
    assert {layer.window for layer in family_config("mistral").layers} == {4096}
    assert {layer.window for layer in family_config("mistral", sliding_window=None).layers} == {
        None
    }
    qwen2 = family_config("qwen2", sliding_window=8, max_window_layers=1)
    assert [layer.window for layer in qwen2.layers] == [None, 8]
    assert qwen2.attention_bias
    assert not qwen2.output_bias
    assert family_config("qwen3").layers[0].head_dim == 128
    gemma3 = family_config("gemma3", sliding_window=8)
    assert [layer.window for layer in gemma3.layers] == [8] * 5 + [None]
    thetas = [layer.rope.theta for layer in gemma3.layers if layer.rope]
    assert thetas == [10000.0] * 5 + [1000000.0]
    assert gemma3.attention_scale == 256**-0.5
    moe = family_config("qwen3_moe", mlp_only_layers=[0])
    assert [layer.is_sparse for layer in moe.layers] == [False, True]


def test_rope_of_older_gemma3_configs() -> None:
    gemma3 = family_config(
        "gemma3",
        sliding_window=8,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    local, full = gemma3.layers[0].rope, gemma3.layers[5].rope
    assert local is not None
    assert full is not None
    assert (local.theta, local.kind) == (2e4, "default")
    assert (full.theta, full.kind, full.factor) == (5e5, "linear", 8.0)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("qwen2", {"sliding_window": 8, "layer_types": ["odd", "odd"]}, "layer_types"),
        ("qwen2", {"sliding_window": "8"}, "sliding_window"),
        ("gemma3", {"sliding_window": 8, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"sliding_window": None}, "sliding_window"),
        ("gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3", {"sliding_window": 8, "hidden_activation": "relu"}, "hidden_activation"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
    ],
)
def test_bad_family_config_is_refused_by_name(
    name: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        family_config(name, **change)


def test_refusal_lists_what_can_run() -> None:
    with pytest.raises(ConfigError, match="Supported: LlamaForCausalLM, .*Gemma3ForCausalLM"):
        config_from_hf(HF | {"architectures": ["BertModel"]})
    with pytest.raises(ConfigError, match="Supported: llama, .*qwen3moe"):
        config_from_gguf(GGUF | {"general.architecture": "mamba"}, ())
