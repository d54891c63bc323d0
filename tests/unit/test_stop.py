from hypothesis import given
from hypothesis import strategies as st

from shoal.backend.text.stop import StopChecker

SMALL_TEXT = st.text("ab", max_size=12)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    checker = StopChecker(stops)
    emitted = []
    for piece in pieces:
        text, stopped = checker.push(piece)
        emitted.append(text)
        if stopped:
            return emitted, True
    return [*emitted, checker.flush()], False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the shortest beginning that ends in a stop string, less the longest such."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(SMALL_TEXT))
def test_emits_exactly_what_precedes_the_first_stop(stops: list[str], pieces: list[str]) -> None:
    emitted, stopped = run(stops, pieces)
    assert ("".join(emitted), stopped) == expected(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), SMALL_TEXT)
def test_holds_back_only_a_live_prefix(stops: list[str], text: str) -> None:
    checker = StopChecker(stops)
    emitted, stopped = checker.push(text)
    if not stopped:
        held = text[len(emitted) :]
        live = [n for n in range(1, len(text) + 1) for s in stops if s.startswith(text[-n:])]
        assert len(held) == max(live, default=0)


def test_stop_string_over_many_tokens_never_leaks() -> None:
    emitted, stopped = run(["DEFGHIJ"], ["ABC", "DE", "F", "GHI", "JK"])
    assert emitted == ["ABC", "", "", "", ""]
    assert stopped


def test_unrelated_stop_holds_nothing_back() -> None:
    assert run(["zzz"], ["</th", "ink>", "x"]) == (["</th", "ink>", "x", ""], False)


def test_held_text_returns_when_output_ends() -> None:
    assert run(["stop"], ["a", "sto"]) == (["a", "", "sto"], False)


def test_no_stop_strings() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], False)
