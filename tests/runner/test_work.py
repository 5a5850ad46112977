"""A step's work as integers: every row once, every kind of thing where it is looked for."""

from itertools import pairwise

import pytest

from foreword.runner.attention.sharing import Group
from foreword.runner.attention.tiles import Segment
from foreword.runner.attention.work import (
    MERGE_FIELDS,
    STORE_ROWS,
    STRIP_FIELDS,
    Cutting,
    Room,
    Strips,
    offsets,
    plan_work,
)

SIZE = 16
CUTTING = Cutting(narrow=4, wide=32)


def lay(*chunks: tuple[int, int]) -> tuple[Segment, ...]:
    """Segments of (start, count), one after the other, each with blocks of its own."""
    segments: list[Segment] = []
    row = block = 0
    for start, count in chunks:
        num = -(-(start + count) // SIZE)
        segments.append(Segment(row, start, count, tuple(range(block, block + num))))
        row, block = row + count, block + num
    return tuple(segments)


def fields(strips: Strips) -> list[tuple[int, ...]]:
    flat = strips.strips
    return [tuple(flat[i : i + STRIP_FIELDS]) for i in range(0, len(flat), STRIP_FIELDS)]


def test_rows_are_cut_by_their_number() -> None:
    work = plan_work(lay((37, 1), (100, 4), (0, 70)), SIZE, CUTTING)
    assert fields(work.narrow) == [(0, 1, 37, 38, 0, 0, 0), (1, 4, 100, 104, 0, 3, 1)]
    assert fields(work.wide) == [(5, 32, 0, 32, 0, 10, 0), (37, 32, 32, 64, 0, 10, 32), (69, 6, 64, 70, 0, 10, 64)]
    assert work.narrow.rows == [n for row in range(5) for n in (row, -1)]
    assert work.wide.rows == [n for row in range(5, 75) for n in (row, -1)]
    assert work.tables == [*range(15)]


def test_without_narrow_strips_all_are_wide() -> None:
    work = plan_work(lay((37, 1), (0, 40)), SIZE, Cutting(narrow=0, wide=32))
    assert work.narrow.num_strips == 0
    assert [strip[:2] for strip in fields(work.wide)] == [(0, 1), (1, 32), (33, 8)]


def test_slots_follow_the_block_table() -> None:
    (segment,) = lay((14, 20))
    segment = Segment(0, segment.start, segment.count, (5, 9, 2))
    assert plan_work([segment], SIZE, CUTTING).slots == [5 * 16 + 14, 5 * 16 + 15, *range(144, 160), 32, 33]


def test_shared_keys_are_skipped_and_their_rows_listed() -> None:
    head = tuple(range(10))
    segments = (
        Segment(0, 170, 1, (*head, 20)),
        Segment(1, 40, 1, (30, 31, 32)),
        Segment(2, 165, 2, (*head, 21)),
    )
    work = plan_work(segments, SIZE, CUTTING, (Group((0, 2), 10),), key_tile=64)
    assert [(strip[0], strip[4]) for strip in fields(work.narrow)] == [(0, 128), (1, 0), (2, 128)], "whole tiles only"
    assert work.members == [0, 2, 3]
    assert work.narrow.rows == [0, 0, 1, -1, 2, 1, 3, 2]
    ((row, count, start, end, skip, table, number),) = fields(work.shared)
    assert (row, count, end, skip, table, number) == (0, 3, 128, 0, 0, 0)
    assert start > 2**20, "they see every key"
    small = plan_work(segments, SIZE, CUTTING, (Group((0, 2), 3),), key_tile=64)
    assert (small.shared.num_strips, small.members) == (0, []), "less than a tile is not worth it"


def test_members_fill_several_strips() -> None:
    head = tuple(range(4))
    segments = tuple(Segment(i, 64, 1, (*head, 10 + i)) for i in range(70))
    work = plan_work(segments, SIZE, CUTTING, (Group(tuple(range(70)), 4),))
    assert [(strip[0], strip[1]) for strip in fields(work.shared)] == [(0, 32), (32, 32), (64, 6)]


@pytest.mark.parametrize("seed", range(3))
def test_packed_things_are_where_they_are_looked_for(seed: int) -> None:
    work = plan_work(lay((37 + seed, 1), (5, 3), (0, 40 + seed)), SIZE, CUTTING)
    for room in (work.room(), Room(rows=80, narrow=5, narrow_rows=9, wide=7, wide_rows=64, shared=2, shared_rows=5)):
        assert work.fits(room)
        packed, places = list(work.pack(room)), offsets(room)
        assert len(packed) == places["end"]
        parts = {name: packed[a:b] for (name, a), (_, b) in pairwise(places.items())}
        for name, used, nothing in (
            ("slots", work.slots, -1),
            ("narrow", work.narrow.strips, 0),
            ("narrow_rows", work.narrow.rows, -1),
            ("wide", work.wide.strips, 0),
            ("wide_rows", work.wide.rows, -1),
        ):
            assert parts[name][: len(used)] == used
            assert set(parts[name][len(used) :]) <= {nothing}
        assert len(parts["slots"]) % STORE_ROWS == 0
        assert all(place % 4 == 0 for place in places.values())
        assert len(parts["narrow_rows"]) >= room.narrow_rows * MERGE_FIELDS


def test_what_does_not_fit_says_so() -> None:
    work = plan_work(lay((37, 1), (5, 3), (0, 40)), SIZE, CUTTING)
    room = work.room()
    assert work.fits(room)
    for field in ("rows", "narrow", "narrow_rows", "wide", "wide_rows"):
        less = {name: getattr(room, name) for name in room.__slots__}
        assert not work.fits(Room(**{**less, field: less[field] - 1}))
