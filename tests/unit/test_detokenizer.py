from hypothesis import given, settings
from hypothesis import strategies as st
from text_builders import EOS, make_tokenizer
from tokenizers import Tokenizer as FastTokenizer

from shoal.backend.text.detokenizer import IncrementalDetokenizer
from shoal.backend.text.tokenizer import Tokenizer

TOKENIZER = make_tokenizer()
VOCAB_SIZE = 49152  # of SmolLM2


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


@given(st.lists(st.integers(0, 258)))
def test_pieces_join_to_the_librarys_decode(token_ids: list[int]) -> None:
    fast: FastTokenizer = TOKENIZER._fast
    full = fast.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces_of(TOKENIZER, token_ids)) == full
    assert TOKENIZER.decode(token_ids, skip_special=True) == full


@settings(max_examples=300)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_pieces_join_to_full_decode_of_the_real_vocabulary(
    smollm2_tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    full = smollm2_tokenizer._fast.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces_of(smollm2_tokenizer, token_ids)) == full


@given(st.lists(st.integers(0, 258)), st.integers(1, 5))
def test_several_tokens_at_once_give_the_same_text(token_ids: list[int], size: int) -> None:
    one_by_one = IncrementalDetokenizer(TOKENIZER)
    together = IncrementalDetokenizer(TOKENIZER)
    for start in range(0, len(token_ids), size):
        part = token_ids[start : start + size]
        assert together.push_all(part) == "".join(map(one_by_one.push, part))
    assert together.finish() == one_by_one.finish()


@given(st.text())
def test_whole_characters_only(text: str) -> None:
    pieces = pieces_of(TOKENIZER, list(text.encode()))
    assert "".join(pieces) == text
    # One token a byte here: the last byte of each character brings it, the others bring nothing.
    assert [piece for piece in pieces if piece] == list(text)


def test_emoji_and_cjk_come_whole() -> None:
    pieces = pieces_of(TOKENIZER, list("🤗👩‍👩‍👧 你好".encode()))
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list("🤗👩‍👩‍👧 你好")


def test_half_a_character_at_the_end_becomes_one_replacement() -> None:
    assert pieces_of(TOKENIZER, [97, 0xF0, 0x9F, 0xA4]) == ["a", "", "", "", "\ufffd"]


def test_special_and_padding_ids_have_no_text() -> None:
    assert pieces_of(TOKENIZER, [97, EOS, 100_000, 98]) == ["a", "", "", "b", ""]


def test_special_token_does_not_part_a_character() -> None:
    assert "".join(pieces_of(TOKENIZER, [0xC3, EOS, 0xA9])) == "é"
