"""Stop strings: the first to be completed ends the text, however the text is cut."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foreword.text.stops import StopStrings

few = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: as soon as the text ends with stop strings, cut the longest off."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(text=few, stops=stop_lists, cuts=st.lists(st.integers(0, 30), max_size=8))
@example(text="abcabcabd", stops=["abcabd"], cuts=[1, 4])
def test_any_cut_gives_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopStrings(stops)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    given_out = ""
    for start, end in pairwise(borders):
        given_out += matcher.push(text[start:end])
        if not matcher.stopped:
            # Held is exactly what could still become a stop string: no more, no less.
            possible = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
            assert given_out == text[: end - max(possible, default=0)]
    stopped = matcher.stopped
    given_out += matcher.finish()
    assert (given_out, stopped) == naive(text, stops)


def test_held_text_comes_out_at_the_end() -> None:
    matcher = StopStrings(["END"])
    assert [matcher.push(piece) for piece in ("the E", "N", " E", "N")] == ["the ", "", "EN ", ""]
    assert matcher.finish() == "EN"


def test_nothing_after_a_stop_string() -> None:
    matcher = StopStrings(["\n\n", "###"])
    assert matcher.push("one\n\ntwo") == "one"
    assert matcher.stopped
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


def test_the_longest_of_stop_strings_that_end_together_wins() -> None:
    matcher = StopStrings(["b", "ab"])
    assert matcher.push("xab") == "x"


def test_no_stop_strings_let_all_through() -> None:
    matcher = StopStrings([])
    assert matcher.push("abc") == "abc"
    assert not matcher.stopped


@pytest.mark.parametrize("stop", ["a" * 20_000, "ab" * 10_000])
def test_long_periodic_stop_strings_take_linear_time(stop: str) -> None:
    matcher = StopStrings([stop])
    text = (stop[:-1] + "x") * 3
    assert "".join(matcher.push(text[i : i + 7]) for i in range(0, len(text), 7)) + matcher.finish() == text
