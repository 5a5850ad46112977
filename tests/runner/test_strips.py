"""How rows are cut into strips: each row once, through each of its keys once and in order, and shared ones together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.runner.attention.strips import Strip, Walk, cut
from foreword.runner.attention.tiles import Segment

SIZE, CHUNK, MOST = 16, 64, 12


def segments(*wanted: tuple[int, int, int, int]) -> list[Segment]:
    """For each (start, count, head, shared): a segment whose first `shared` full blocks are those of that head."""
    made: list[Segment] = []
    row = fresh = 0
    for start, count, head, shared in wanted:
        num_blocks, num_shared = -(-(start + count) // SIZE), min(shared, start // SIZE)
        own = tuple(range(10_000 + fresh, 10_000 + fresh + num_blocks - num_shared))
        fresh += len(own)
        made.append(Segment(row, start, count, (*range(1_000 * head, 1_000 * head + num_shared), *own)))
        row += count
    return made


def walked(strip: Strip) -> int:
    """Keys that are brought into place."""
    return sum(walk.end - walk.begin for walk in strip.walks)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 30), st.integers(0, 2), st.integers(0, 18)),
        min_size=1,
        max_size=12,
    )
)
def test_each_row_goes_by_each_of_its_keys_once(wanted: list[tuple[int, int, int, int]]) -> None:
    given_ = segments(*wanted)
    tables = [block for segment in given_ for block in segment.blocks]
    seen: dict[int, int] = {}
    for strip in cut(given_, MOST, SIZE, CHUNK):
        assert sum(part.rows for part in strip.parts) <= MOST
        assert [part.start for part in strip.parts] == sorted(part.start for part in strip.parts)
        place = 0
        for part in strip.parts:
            assert part.place == place, "parts stand side by side"
            place += part.rows
            segment = next(one for one in given_ if one.row <= part.row < one.row + one.count)
            assert part.start - segment.start == part.row - segment.row
            at = 0
            for walk in strip.walks:
                if walk.place <= part.place and part.place + part.rows <= walk.place + walk.rows:
                    assert walk.begin == at
                    assert walk.begin % CHUNK == 0
                    at = walk.end
                    for key in range(walk.begin, min(walk.end, part.start + part.rows), SIZE):
                        assert tables[walk.table + key // SIZE] == segment.blocks[key // SIZE]
                else:
                    assert walk.place >= part.place + part.rows or walk.place + walk.rows <= part.place
            assert at == part.start + part.rows
            for row in range(part.row, part.row + part.rows):
                seen[row] = seen.get(row, 0) + 1
        for walk in strip.walks:
            inside = [part for part in strip.parts if walk.place <= part.place < walk.place + walk.rows]
            at = {part.row + i: part.start + i for part in inside for i in range(part.rows)}
            assert len(at) == walk.rows
            assert (at[walk.row], at[walk.last]) == (min(at.values()), max(at.values()))
    assert seen == dict.fromkeys(range(sum(count for _, count, _, _ in wanted)), 1)


def test_what_is_shared_is_walked_by_once() -> None:
    strangers = segments(*((200, 1, i, 12) for i in range(4)))
    sharers = segments(*((200 + i, 1, 0, 12) for i in range(4)))
    assert sum(walked(strip) for strip in cut(strangers, MOST, SIZE, CHUNK)) == 4 * 201
    (strip,) = cut(sharers, MOST, SIZE, CHUNK)
    assert strip.walks == (
        Walk(place=0, rows=4, begin=0, end=192, table=0, row=0, last=3),
        *(Walk(place=i, rows=1, begin=192, end=201 + i, table=13 * i, row=i, last=i) for i in range(4)),
    )


def test_a_strip_holds_no_more_rows_than_it_may() -> None:
    strips = cut(segments(*((200, 5, 0, 12) for _ in range(5))), MOST, SIZE, CHUNK)
    assert sorted(len(strip.parts) for strip in strips) == [1, 2, 2]
    (long, short) = cut(segments((100, 20, 0, 0), (200, 1, 1, 0)), 20, SIZE, CHUNK)
    assert (long.parts[0].rows, short.parts[0].rows) == (20, 1), "many rows take longer than many keys"


@pytest.mark.parametrize(("start", "shared"), [(63, 3), (200, 3), (200, 0)])
def test_less_than_a_chunk_is_not_shared(start: int, shared: int) -> None:
    strips = cut(segments((start, 1, 0, shared), (start, 1, 0, shared)), MOST, SIZE, CHUNK)
    assert [len(strip.parts) for strip in strips] == [1, 1]
