"""A model of one small layer that costs next to nothing, to measure what is around the engine."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shoal.backend.models.decoder import Decoder
from shoal.backend.models.model_config import ModelConfig
from shoal.backend.models.registry import config_from_hf

NUM_WORDS = 1790
EOS_ID = 256

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "bfloat16",
}


def write_noop_model(folder: Path) -> Path:
    """A checkpoint whose greedy text is made of whole words: each token is a few letters."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    values = CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    generator = torch.Generator().manual_seed(0)
    config = config_from_hf(values)
    assert isinstance(config, ModelConfig)
    shapes = Decoder.weight_shapes(config)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    for name, tensor in tensors.items():
        if "lm_head" in name:
            tensor[: EOS_ID + 1] = 0  # neither single bytes nor the end of the text
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "</s>", "add_bos_token": False})
    )
    return folder


def _tokenizer() -> Tokenizer:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("</s>", special=True)])
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [
        f" {letters[i % 26]}{letters[i // 26 % 26]}{letters[i // 676]}x" for i in range(NUM_WORDS)
    ]
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer
