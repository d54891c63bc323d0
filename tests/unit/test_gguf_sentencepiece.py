"""SentencePiece vocabularies from GGUF: the very tokeniser that transformers makes of the file."""

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shoal.backend.engine_config import ConfigError
from shoal.backend.text.gguf_tokenizer import build_fast_tokenizer
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import resolve_weights

SPACE = "\u2581"
LETTERS = "abcn"
# Bytes, then pieces that overlap in many ways, so that the order of merges matters.
PIECES = [
    *LETTERS,
    SPACE,
    *("".join(pair) for pair in itertools.product("ab" + SPACE, "abc")),
    "aba",
    "abab",
    f"{SPACE}abc",
    "can",
    "banana",
    "ban",
    "an",
    "ana",
    "nab",
]
CONTROL, USER, BYTE, UNKNOWN = 3, 4, 6, 2


def write_vocabulary(path: Path, architecture: str) -> Path:
    named = ["<pad>", "<eos>", "<bos>", "<unk>"]
    gemma = architecture == "gemma3"
    extra = ["<mask>", "<turn>", "\n\n", "  "] if gemma else ["<turn>", "\n\n"]
    tokens = [*named, *extra, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = {"<unk>": UNKNOWN, "\n\n": USER, "  ": USER}
    types = [
        BYTE if token.startswith("<0x") else kinds.get(token, CONTROL if token[0] == "<" else 1)
        for token in tokens
    ]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    # Ties are common: then length decides.
    writer.add_token_scores([-float(idx % 7) for idx in range(len(tokens))])
    writer.add_token_types(types)
    for name, idx in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(idx)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["gemma3", "llama"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ours and transformers' tokeniser of one file."""
    path = write_vocabulary(tmp_path_factory.mktemp("gguf") / "m.gguf", request.param)
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return Tokenizer.from_checkpoint(path), oracle


def test_vocabulary_and_merges_equal(both: Any) -> None:
    ours, oracle = both
    mine = json.loads(ours._fast.to_str())
    theirs = json.loads(oracle.backend_tokenizer.to_str())
    assert mine["model"]["vocab"] == theirs["model"]["vocab"]
    assert mine["model"]["merges"] == theirs["model"]["merges"]
    assert mine["decoder"] == theirs["decoder"]


@given(text=st.text(alphabet="abcn \n\té🦈<>", max_size=30))
@settings(max_examples=150)
def test_ids_and_text_equal(both: Any, text: str) -> None:
    ours, oracle = both
    ids = oracle.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids
    assert ours.encode(text, add_bos=True) == [2, *ids]  # exactly one


def test_special_and_user_defined_tokens(both: Any) -> None:
    ours, oracle = both
    text = "a<turn>b\n\nc<bos>"
    assert ours.encode(text) == oracle.encode(text, add_special_tokens=False)
    forged = ours.encode(text, allow_special=False)
    assert not {ours.special_tokens["<turn>"], 2} & set(forged)
    assert ours.encode("<bos>a", add_bos=True).count(2) == 1


def test_every_byte_comes_back(both: Any) -> None:
    ours, _ = both
    text = "".join(map(chr, [*range(1, 0x100), 0x1F988]))
    pieces = [ours.token_bytes(token_id) for token_id in ours.encode(text)]
    assert b"".join(pieces).decode().lstrip(" ") == text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.token_type": 3}, "tokenizer.ggml.token_type"),
    ],
)
def test_unsound_metadata_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.scores": [0.0, 0.0],
    }
    with pytest.raises(ConfigError, match=named):
        build_fast_tokenizer(metadata | change)


# Ids by transformers' own conversion of the file.
GEMMA3_IDS = {
    "Hello world": [9259, 1902],
    " hi  there\n\n  x": [5631, 138, 13534, 108, 138, 236781],
    "日本語 🦈": [94951, 236743, 250012],
    "a<start_of_turn>user": [236746, 105, 2364],
    "12345 foo\tbar": [236770, 236778, 236800, 236812, 236810, 46293, 255968, 2230],
    "<0x41>": [236820, 236771, 236781, 236812, 236770, 236813],
}


def test_real_gemma3() -> None:
    try:
        path = resolve_weights("gemma3-270m")
    except ConfigError as error:
        pytest.skip(str(error))
    tokenizer = Tokenizer.from_checkpoint(path)
    for text, ids in GEMMA3_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, add_bos=True) == [2, *ids]
    assert tokenizer.eos_token_ids == {1}
