import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import EOS, make_tokenizer

from shoal.backend.text.output_processor import OutputProcessor, TextDelta
from shoal.scheduler.outputs import SampledToken
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason

TOKENIZER = make_tokenizer()


def processor(**sampling: object) -> OutputProcessor:
    return OutputProcessor(TOKENIZER, SamplingParams.from_dict(dict(sampling)))


def push_text(outputs: OutputProcessor, text: str) -> list[TextDelta]:
    return [outputs.push(SampledToken(byte)) for byte in text.encode()]


def test_deltas_are_the_text() -> None:
    outputs = processor()
    deltas = push_text(outputs, "né")
    assert deltas == [TextDelta("n", 1), TextDelta("", 1), TextDelta("é", 1)]
    assert outputs.push(SampledToken(EOS), FinishReason.STOP) == TextDelta("", 1, FinishReason.STOP)
    assert outputs.num_output_tokens == 4


def test_stop_token_has_no_text() -> None:
    outputs = processor(stop_token_ids=[ord("7")])
    push_text(outputs, "6")
    assert outputs.push(SampledToken(ord("7")), FinishReason.STOP).text == ""


def test_last_token_of_a_length_finish_has_text() -> None:
    delta = processor().push(SampledToken(ord("x")), FinishReason.LENGTH)
    assert delta == TextDelta("x", 1, FinishReason.LENGTH)


def test_stop_string_ends_the_text() -> None:
    outputs = processor(stop=["7"])
    deltas = push_text(outputs, "5, 6, 7, 8")
    assert "".join(delta.text for delta in deltas) == "5, 6, "
    assert [delta.stop_hit for delta in deltas].index(True) == 6
    assert deltas[6].finish_reason is FinishReason.STOP
    assert deltas[7:] == [TextDelta()] * 3
    assert outputs.num_output_tokens == 7


def test_stop_string_at_the_length_limit_is_a_stop() -> None:
    delta = processor(stop=["b"]).push(SampledToken(ord("b")), FinishReason.LENGTH)
    assert delta == TextDelta("", 1, FinishReason.STOP, stop_hit=True)


def test_held_text_comes_with_the_finish() -> None:
    outputs = processor(stop=["stop"])
    push_text(outputs, "st")
    assert outputs.push(SampledToken(EOS), FinishReason.STOP).text == "st"


def test_half_a_character_comes_with_the_finish() -> None:
    outputs = processor()
    outputs.push(SampledToken(0xF0))
    assert outputs.push(None, FinishReason.CANCELLED).text == "\ufffd"


def test_stop_string_does_not_count_before_min_tokens() -> None:
    deltas = push_text(processor(stop=["a"], min_tokens=2), "aaab")
    assert [delta.text for delta in deltas] == ["a", "a", "", ""]
    assert deltas[2].stop_hit


def test_logprobs_add_up() -> None:
    outputs = processor()
    outputs.push(SampledToken(97, logprob=-1.0))
    outputs.push(SampledToken(97, logprob=-0.5))
    assert outputs.cumulative_logprob == pytest.approx(-1.5)


def entry_texts(deltas: list[TextDelta]) -> list[str]:
    return [entry.sampled.text for delta in deltas for entry in delta.logprobs]


def test_logprobs_come_with_the_text_of_their_tokens() -> None:
    outputs = processor(logprobs=1, stop=["stop"])
    tokens = [SampledToken(byte, -0.5, ((byte, -0.5),)) for byte in "é st, é".encode()]
    deltas = [outputs.push(token) for token in tokens]
    assert [len(delta.logprobs) for delta in deltas] == [0, 2, 1, 0, 0, 3, 1, 0, 2]
    assert entry_texts(deltas) == ["", "é", " ", "s", "t", ",", " ", "", "é"]
    assert [e.sampled.token_bytes for d in deltas for e in d.logprobs][:2] == [b"\xc3", b"\xa9"]
    end = outputs.push(SampledToken(EOS, -1.0), FinishReason.STOP)
    assert end.logprobs == ()  # the token that ends the text has no part in it


@given(
    st.lists(st.integers(0, 255)),
    st.lists(st.text("ab🤗", min_size=1, max_size=3), max_size=3),
    st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_logprob_entries_spell_the_text(
    ids: list[int], stops: list[str], end: FinishReason
) -> None:
    outputs = processor(stop=stops, logprobs=0)
    deltas = [outputs.push(SampledToken(token_id, -1.0)) for token_id in ids]
    deltas.append(outputs.push(None, end))
    text = "".join(delta.text for delta in deltas)
    assert "".join(entry_texts(deltas)) == text
    if not any(delta.stop_hit for delta in deltas):
        entries = [entry.sampled for delta in deltas for entry in delta.logprobs]
        assert [entry.token_id for entry in entries] == ids
        assert b"".join(entry.token_bytes for entry in entries) == bytes(ids)


@given(st.lists(st.integers(0, 255)), st.lists(st.text("ab🤗", min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_full_text_up_to_the_stop(ids: list[int], stops: list[str]) -> None:
    outputs = processor(stop=stops)
    text = "".join(outputs.push(SampledToken(token_id)).text for token_id in ids)
    text += outputs.push(None, FinishReason.LENGTH).text
    full = TOKENIZER.decode(ids)
    assert full.startswith(text)
    assert not any(stop in text for stop in stops)
    if not any(stop in full for stop in stops):
        assert text == full
