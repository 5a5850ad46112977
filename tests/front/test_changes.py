"""What changed between two prompts: found where it is, whatever stands around it, and nothing where nothing did."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.front.changes import MAX_SPAN, WORTH, Change, Kind, change, common

HEAD = list(range(1000, 1050))
REST = list(range(2000, 2200))
TAIL = [7, 8, 9]


def words(*parts: list[int]) -> bytes:
    return array("I", [token for part in parts for token in part]).tobytes()


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [([1, 2], [1, 3], "changed"), ([1], [4, 5, 6], "changed"), ([], [4, 5], "inserted"), ([4, 5], [], "removed")],
)
def test_what_stands_there_changes_comes_or_goes(old: list[int], new: list[int], kind: Kind) -> None:
    found = change(words(HEAD, old, REST, [1, 1], TAIL), words(HEAD, new, REST, [2, 2], TAIL))
    start = 50 + (1 if old[:1] == new[:1] and old else 0)
    assert found == Change(kind, start, 50 + len(new), 50 + len(old), len(REST))


def test_parts_in_another_order_are_told_from_new_ones() -> None:
    one, two, three = (list(range(n, n + 60)) for n in (3000, 4000, 5000))
    found = change(words(HEAD, one, two, three, REST), words(HEAD, two, three, one, REST))
    assert found is not None
    assert (found.kind, found.start, found.same) == ("reordered", 50, 180 + len(REST))
    other = list(range(6000, 6060))
    found = change(words(HEAD, one, two, three, REST), words(HEAD, one, other, three, REST))
    assert found == Change("changed", 110, 170, 170, 60 + len(REST))


def test_other_prompts_are_no_change() -> None:
    assert change(words(HEAD, [1] * 40), words(HEAD, [2] * 40)) is None
    assert change(words(HEAD, REST), words(HEAD, REST, [1] * 99)) is None  # a chat that has grown
    assert change(words(HEAD, [1], REST[: WORTH - 1]), words(HEAD, [2], REST[: WORTH - 1])) is None
    assert change(words(HEAD, [1], REST[:WORTH]), words(HEAD, [2], REST[:WORTH])) is not None
    far = list(range(9000, 9000 + 2 * MAX_SPAN))
    assert change(words(HEAD, [1], REST), words(HEAD, far, REST)) is None
    assert change(b"", words(HEAD)) is None


@given(
    st.lists(st.integers(0, 5), max_size=80),
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.integers(0, 5), max_size=120),
)
def test_what_is_said_is_true_of_the_tokens(head: list[int], old: list[int], new: list[int], rest: list[int]) -> None:
    one, other = head + old + rest, head + new + rest
    found = change(words(one), words(other))
    shared = common(words(one), words(other))
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 1] != other[shared : shared + 1] or shared == len(one) == len(other)
    if found is not None:
        assert found.start == shared
        if found.kind != "reordered":
            assert one[found.old_end :][: found.same] == other[found.end :][: found.same]
            assert (found.end == shared) == (found.kind == "removed")
        assert WORTH <= found.same <= len(other) - shared


def test_long_runs_of_one_token_are_left_in_one_leap() -> None:
    one, other = words(HEAD, [1], [0] * 50_000), words(HEAD, [2], [0] * 20_000, [3], [0] * 40_000)
    found = change(one, other)
    assert found is not None
    assert found.same > 19_900
