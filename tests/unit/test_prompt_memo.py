import pytest

from shoal.backend import prompt_memo
from shoal.backend.prompt_memo import CHARS_EACH, PromptMemo


class Counted:
    """Encodes a text to its characters' codes, and counts how often."""

    def __init__(self, memo):
        self.memo = memo
        self.count = 0

    def __call__(self, text, salt=b"", form="text"):
        def encode():
            self.count += 1
            return list(map(ord, text))

        return self.memo.encode(salt, form, text, encode)


def test_a_text_is_encoded_once_and_each_gets_a_list_of_his_own():
    encode = Counted(PromptMemo())
    encode("abc").append(0)
    encode("abc").append(1)
    assert encode("abc") == [97, 98, 99]
    assert encode.count == 1


@pytest.mark.parametrize("other", [{"salt": b"s"}, {"form": "chat "}])
def test_nothing_is_shared_between_salts_or_forms(other):
    encode = Counted(PromptMemo())
    encode("abc")
    encode("abc", **other)
    assert encode.count == 2


def test_the_longest_unused_go_first_and_each_costs_something_beside_its_text():
    encode = Counted(PromptMemo(max_chars=3 * (CHARS_EACH + 1)))
    for text in "abcad":  # d in place of b
        encode(text)
    assert encode.count == 4
    encode("a")
    encode("c")
    assert encode.count == 4
    encode("b")
    assert encode.count == 5


def test_long_texts_are_not_kept(monkeypatch):
    monkeypatch.setattr(prompt_memo, "MAX_TEXT_CHARS", 3)
    encode = Counted(PromptMemo())
    encode("abcd")
    encode("abcd")
    assert encode.count == 2
