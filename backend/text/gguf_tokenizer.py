"""A fast tokeniser from GGUF metadata: byte-level BPE vocabularies, and by way of
``gguf_sentencepiece`` those of SentencePiece."""

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from shoal.backend.engine_config import ConfigError
from shoal.backend.text.gguf_sentencepiece import build_sentencepiece

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

# tokenizer.ggml.pre: how text is cut into words before the merges
_PLAIN = frozenset({"default", "gpt-2", "gpt2", "olmo", "jais", "phi-2", "mpt"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_SUPPORTED = sorted(_PLAIN | _SINGLE_DIGITS | _LLAMA3 | _QWEN2)


def build_fast_tokenizer(metadata: dict[str, Any]) -> FastTokenizer:
    """Build the tokeniser. Raises ConfigError, naming the metadata key, when it is unsupported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return build_sentencepiece(metadata)
    if kind != "gpt2":
        raise ConfigError(
            f"tokenizer.ggml.model {str(kind)[:64]!r} is not supported; supported: gpt2, llama. "
            "Serve the model from a folder with tokenizer.json."
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    merges = [_merge(text) for text in _list(metadata, "tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigError("tokenizer.ggml.tokens holds a token twice.")
    ignore_merges = pre in _LLAMA3
    try:
        fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}.") from error
    fast.pre_tokenizer = _pre_tokenizer(pre)
    if pre in _QWEN2:
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise ConfigError("tokenizer.ggml.token_type must be a list.")
    _add_tokens(fast, tokens, types)
    return fast


def _list(metadata: dict[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ConfigError(f"{key} is missing from the GGUF file.")
    return values


def _merge(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _PLAIN:
        return words
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in _LLAMA3 or pre in _QWEN2:
        pattern = _LLAMA3_WORDS if pre in _LLAMA3 else _QWEN2_WORDS
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ConfigError(
        f"tokenizer.ggml.pre {pre[:64]!r} is not supported; supported: {', '.join(_SUPPORTED)}."
    )


def _add_tokens(fast: FastTokenizer, tokens: list[str], types: list[int]) -> None:
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    fast.add_tokens(added)
