"""A fast tokeniser from GGUF metadata, for SentencePiece vocabularies (BPE with byte fallback).

Token ids equal those of transformers' own conversion. A file lists no merges: they follow from the
vocabulary, whose pieces each are a merge of two others, the best first.
"""

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from shoal.backend.engine_config import ConfigError

SPACE = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_NAMED_TOKENS = ("bos", "eos", "unknown", "padding")
_GEMMA = ("gemma", "gemma2", "gemma3")

Merge = tuple[str, str]


def build_sentencepiece(metadata: dict[str, Any]) -> FastTokenizer:
    """Build the tokeniser. Raises ConfigError, naming the metadata key, when it is unsound."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError("tokenizer.ggml.tokens is missing from the GGUF file.")
    architecture = metadata.get("general.architecture")
    fast = _gemma(tokens) if architecture in _GEMMA else _llama(tokens, _scores(metadata, tokens))
    fast.add_tokens(_added_tokens(fast, metadata, tokens))
    return fast


def _gemma(tokens: list[str]) -> FastTokenizer:
    # Runs of spaces are stored as such, but met as the marks that spaces are replaced with. Scores
    # do not follow the order of merges; the order of the pieces does.
    pieces = [SPACE * len(token) if token.isspace() and " " in token else token for token in tokens]
    vocab = {piece: idx for idx, piece in enumerate(pieces)}
    merges = [merge for piece in vocab for merge in _splits(piece, vocab)]
    fast = _bpe(vocab, merges, unk_token="<unk>")
    fast.normalizer = normalizers.Replace(" ", SPACE)
    fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    fast.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return fast


def _llama(tokens: list[str], scores: list[float]) -> FastTokenizer:
    vocab = {piece: idx for idx, piece in enumerate(tokens)}
    ranked = [
        (score, merge)
        for piece, score in dict(zip(tokens, scores, strict=True)).items()
        for merge in sorted(
            _splits(piece, vocab), key=lambda merge: [vocab[part] for part in merge]
        )
    ]
    ranked.sort(key=lambda item: (item[0], len(item[1][0]), len(item[1][1])), reverse=True)
    fast = _bpe(vocab, [merge for _, merge in ranked], unk_token=None)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return fast


def _splits(piece: str, vocab: dict[str, int]) -> Iterator[Merge]:
    """The pairs of pieces that a piece can be merged of, the longest left part first."""
    for end in range(len(piece) - 1, 0, -1):
        left, right = piece[:end], piece[end:]
        if left in vocab and right in vocab:
            yield left, right


def _bpe(vocab: dict[str, int], merges: list[Merge], unk_token: str | None) -> FastTokenizer:
    options = {} if unk_token is None or unk_token not in vocab else {"unk_token": unk_token}
    try:
        return FastTokenizer(
            models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, **options)
        )
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.ggml.tokens make no vocabulary: {error}.") from error


def _scores(metadata: dict[str, Any], tokens: list[str]) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError("tokenizer.ggml.scores must hold a number for each token.")
    return scores


def _added_tokens(
    fast: FastTokenizer, metadata: dict[str, Any], tokens: list[str]
) -> list[AddedToken]:
    """Control tokens and those with a role are special; user-defined ones are matched whole."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise ConfigError("tokenizer.ggml.token_type must be a list.")
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED_TOKENS)
    named = {tokens[idx] for idx in ids if isinstance(idx, int) and 0 <= idx < len(tokens)}
    return [
        AddedToken(token, special=kind == _CONTROL or token in named, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if token in named
        or kind == _CONTROL
        or (kind == _USER_DEFINED and fast.token_to_id(token) is not None)
    ]
