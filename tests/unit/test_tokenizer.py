import contextlib
import json
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import BOS, TURN_END, make_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from shoal.backend.engine_config import ConfigError
from shoal.backend.text.gguf_metadata import read_gguf_metadata
from shoal.backend.text.tokenizer import Tokenizer, TokenizerSettings


def write_gguf(path: Path, pre: str = "default", **extra: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "Ġ"])
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    for key, value in extra.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(write_gguf(tmp_path / "m.gguf"))
    assert tokenizer.encode("ab a</s>") == [4, 5, 2, 1]
    assert tokenizer.encode("ab", add_bos=True) == [0, 4]
    assert tokenizer.vocab_size == 6
    assert tokenizer.special_tokens == {"<s>": 0, "</s>": 1}
    assert tokenizer.settings.chat_template is None


def test_turn_end_counts_as_eos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(write_gguf(tmp_path / "m.gguf", eot_token_id=5))
    assert tokenizer.eos_token_ids == {1, 5}


def test_metadata_equals_the_gguf_librarys(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -1)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -2)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -3)
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -4)
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.str", "é🤗")
    writer.add_array("a.strs", ["", "x", "ü"])
    writer.add_array("a.ints", [1, -2])
    writer.add_array("a.floats", [0.5, 0.1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    theirs = {key: value.contents() for key, value in fields.items() if key[:5] != "GGUF."}
    assert read_gguf_metadata(tmp_path / "m.gguf") == theirs


def test_unknown_word_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.pre 'klingon'.*llama-bpe"):
        Tokenizer.from_checkpoint(write_gguf(tmp_path / "m.gguf", pre="klingon"))


def test_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eot_token id 6 is outside"):
        Tokenizer.from_checkpoint(write_gguf(tmp_path / "m.gguf", eot_token_id=6))


def test_no_cut_of_a_gguf_file_gets_past(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes().rstrip(b"\0")
    for length in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="cut.gguf"):
            read_gguf_metadata(tmp_path / "cut.gguf")


@given(offset=st.integers(0), value=st.sampled_from([0, 7, 2**31, 2**63 + 1, 2**64 - 1]))
def test_damaged_gguf_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, offset: int, value: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    if not path.exists():
        write_gguf(path.with_suffix(".good"))
    data = bytearray(path.with_suffix(".good").read_bytes())
    struct.pack_into("<Q", data, offset % (len(data) - 8), value)
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):  # the only error there may be
        Tokenizer.from_checkpoint(path)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_checkpoint(tmp_path)


def test_folder_settings(tmp_path: Path) -> None:
    make_tokenizer()._fast.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": "old",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer.settings == TokenizerSettings(
        bos_token_id=BOS,
        eos_token_ids=frozenset({257, 258}),
        add_bos=True,
        chat_template="new",
        special_texts={"bos_token": "<s>", "eos_token": "</s>"},
    )


@pytest.mark.parametrize("text", ["hi", "<s>hi"])
def test_exactly_one_bos(text: str) -> None:
    assert make_tokenizer(add_bos=True).encode(text, add_bos=True) == [BOS, *b"hi"]


def test_no_bos_unless_wanted() -> None:
    assert make_tokenizer(add_bos=False).encode("hi", add_bos=True) == list(b"hi")
    assert make_tokenizer(add_bos=True).encode("hi") == list(b"hi")


def test_special_text_where_not_allowed_is_text() -> None:
    assert make_tokenizer().encode("a<end>", allow_special=False) == list(b"a<end>")


@given(st.lists(st.sampled_from(["a", " ", "<end>", "<s>", "<en", "d>"])))
def test_text_without_marks_is_encoded_as_ever(pieces: list[str]) -> None:
    tokenizer = make_tokenizer()
    text = "".join(pieces)
    assert tokenizer.encode_marked(text, "|") == tokenizer.encode(text)


def test_marks_break_special_tokens_and_vanish() -> None:
    ids = make_tokenizer().encode_marked("x<|end><end>", "|")
    assert ids == [*b"x<end>", TURN_END]


@given(st.lists(st.sampled_from(["a", " ", "  ", "<w>"])))
def test_whitespace_is_swallowed_as_the_library_does(pieces: list[str]) -> None:
    fast = FastTokenizer.from_str(make_tokenizer()._fast.to_str())
    fast.add_tokens([AddedToken("<w>", special=True, lstrip=True, rstrip=True)])
    tokenizer = Tokenizer(fast, TokenizerSettings())
    text = "".join(pieces)
    assert tokenizer.encode_marked(text, "|") == tokenizer.encode(text)


def test_oversized_text_is_seen_without_encoding_it_all(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.surely_exceeds("hello world " * 1000, 100)
    assert not smollm2_tokenizer.surely_exceeds("hello world " * 40, 100)


@given(text=st.text(min_size=1), copies=st.integers(1, 200), limit=st.integers(1, 50))
def test_surely_means_surely(
    smollm2_tokenizer: Tokenizer, text: str, copies: int, limit: int
) -> None:
    if smollm2_tokenizer.surely_exceeds(text * copies, limit):
        assert len(smollm2_tokenizer.encode(text * copies)) > limit
