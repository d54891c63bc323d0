"""The tensors of a Gemma 4 checkpoint by their names in safetensors."""

from shoal.backend.models.gemma4_config import Gemma4Config, Gemma4Layer

Shapes = dict[str, tuple[int, ...]]

# Parts of Gemma4ForConditionalGeneration that text does not need.
_OTHER_PARTS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
# What checkpoints may keep for layers that read another layer's keys and values.
_UNUSED_KEY_PARTS = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")


def weight_shapes(config: Gemma4Config) -> Shapes:
    """Every tensor that the text pass needs."""
    hidden, prefix = config.hidden_size, config.weight_prefix
    shapes: Shapes = {
        f"{prefix}embed_tokens.weight": (config.vocab_size, hidden),
        f"{prefix}norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.per_layer_size:
        width = config.num_layers * config.per_layer_size
        shapes |= {
            f"{prefix}embed_tokens_per_layer.weight": (config.per_layer_vocab_size, width),
            f"{prefix}per_layer_model_projection.weight": (width, hidden),
            f"{prefix}per_layer_projection_norm.weight": (config.per_layer_size,),
        }
    for idx, layer in enumerate(config.layers):
        parts = _attention(config, layer) | _feed_forward(config, layer)
        shapes |= {f"{prefix}layers.{idx}.{name}": shape for name, shape in parts.items()}
    return shapes


def is_unneeded(name: str, config: Gemma4Config) -> bool:
    """Whether a tensor belongs to the checkpoint though the text pass has no use for it."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    if name.startswith(tuple(f"model.{part}" for part in _OTHER_PARTS)):
        return config.weight_prefix != "model."
    shared = (
        f"{config.weight_prefix}layers.{idx}.self_attn."
        for idx, layer in enumerate(config.layers)
        if layer.shared_with is not None
    )
    return any(name.startswith(part) and name.endswith(_UNUSED_KEY_PARTS) for part in shared)


def _attention(config: Gemma4Config, layer: Gemma4Layer) -> Shapes:
    hidden = config.hidden_size
    query, key = (n * layer.head_dim for n in (config.num_heads, layer.num_kv_heads))
    products = {"q_proj": (query, hidden), "o_proj": (hidden, query)}
    norms = ["q_norm"]
    if layer.shared_with is None:
        products["k_proj"] = (key, hidden)
        norms.append("k_norm")
        if not layer.values_are_keys:
            products["v_proj"] = (key, hidden)
    shapes: Shapes = {f"self_attn.{name}.weight": (layer.head_dim,) for name in norms}
    for name, shape in products.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if config.attention_bias:
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    return shapes


def _feed_forward(config: Gemma4Config, layer: Gemma4Layer) -> Shapes:
    hidden, inner = config.hidden_size, layer.intermediate_size
    norms = [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]
    shapes: Shapes = {
        "layer_scalar": (1,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.per_layer_size:
        norms.append("post_per_layer_input_norm")
        shapes["per_layer_input_gate.weight"] = (config.per_layer_size, hidden)
        shapes["per_layer_projection.weight"] = (hidden, config.per_layer_size)
    if config.experts is not None:
        norms += [
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        ]
        count, width = config.experts.num_experts, config.experts.intermediate_size
        shapes |= {
            "router.scale": (hidden,),
            "router.per_expert_scale": (count,),
            "router.proj.weight": (count, hidden),
            "experts.gate_up_proj": (count, 2 * width, hidden),
            "experts.down_proj": (count, hidden, width),
        }
    return shapes | {f"{name}.weight": (hidden,) for name in norms}
