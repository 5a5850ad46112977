"""How a step's rows are cut into strips, each of which a worker takes through its keys: integers only.

Rows of a strip go by a key together, so that what it costs to bring a key into place is paid once. They are neighbours
of one sequence, or rows of several sequences that begin with the same blocks: those walk through what they share side
by side, and then each through the rest of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.runner.attention.sharing import Sharer, find_groups
from foreword.runner.attention.tiles import Segment

_LAYING_OUT = 5
"""Bringing a key into place takes about as long as going by it with so many rows (group of 3 heads, 64 dimensions)."""


class Part(NamedTuple):
    """Neighbouring rows of one sequence."""

    row: int
    """The first, in the batch."""
    start: int
    """Its position."""
    rows: int
    place: int
    """Of the first row, in the strip."""


class Walk(NamedTuple):
    """Neighbouring rows of a strip, taken through keys that lie in one block table."""

    place: int
    """Of the first row, in the strip."""
    rows: int
    begin: int
    """The first key, at a multiple of a chunk; less if no row sees that far back."""
    end: int
    """The key after the last."""
    table: int
    """Where the block table begins, among all tables."""
    row: int
    """The row of the batch that sees earliest."""
    last: int
    """The row of the batch whose sight begins last."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows that are computed together. Within a part positions rise, and so does where the rows' sight begins."""

    parts: tuple[Part, ...]
    walks: tuple[Walk, ...]

    @property
    def work(self) -> int:
        """How long it takes, in no unit."""
        return sum((walk.end - walk.begin) * (walk.rows + _LAYING_OUT) for walk in self.walks)


def cut(segments: Sequence[Segment], most: int, block_size: int, chunk: int) -> list[Strip]:
    """Strips of up to `most` rows that go by `chunk` keys at a time; those that take longest first."""
    tables, num_blocks = list[int](), 0
    for segment in segments:
        tables.append(num_blocks)
        num_blocks += len(segment.blocks)
    strips: list[Strip] = []
    rest = set(range(len(segments)))
    if len(segments) > 1:
        for members, shared in _groups(segments, most, block_size, chunk):
            rest.difference_update(members)
            strips += _together([(segments[i], tables[i]) for i in members], shared, most)
    for i in rest:
        strips += _alone(segments[i], tables[i], most)
    strips.sort(key=lambda strip: -strip.work)
    return strips


def _groups(segments: Sequence[Segment], most: int, block_size: int, chunk: int) -> list[tuple[tuple[int, ...], int]]:
    """Who goes together, and how many keys they share: whole chunks, all written before this step."""
    short = [i for i, segment in enumerate(segments) if 2 * segment.count <= most and segment.start >= chunk]
    sharers = [Sharer(segments[i].blocks, segments[i].start // block_size) for i in short]
    found = (
        (group, group.num_blocks * block_size // chunk * chunk) for group in find_groups(sharers, block_size, chunk)
    )
    return [(tuple(short[i] for i in group.members), shared) for group, shared in found if shared]


def _alone(segment: Segment, table: int, most: int) -> list[Strip]:
    strips: list[Strip] = []
    for done in range(0, segment.count, most):
        row, start, count = segment.row + done, segment.start + done, min(most, segment.count - done)
        strips.append(
            Strip((Part(row, start, count, 0),), (Walk(0, count, 0, start + count, table, row, row + count - 1),))
        )
    return strips


def _together(members: list[tuple[Segment, int]], shared: int, most: int) -> list[Strip]:
    """Strips of members in order of their first position, none of more than `most` rows."""
    strips: list[Strip] = []
    members.sort(key=lambda member: member[0].start)
    while members:
        parts, walks, place = list[Part](), list[Walk](), 0
        first, first_table = members[0]
        while members and place + members[0][0].count <= most:
            segment, table = members.pop(0)
            parts.append(Part(segment.row, segment.start, segment.count, place))
            end, last = segment.start + segment.count, segment.row + segment.count - 1
            walks.append(Walk(place, segment.count, shared, end, table, segment.row, last))
            place += segment.count
        furthest = max(parts, key=lambda part: part.start + part.rows)
        last = furthest.row + furthest.rows - 1
        strips.append(Strip(tuple(parts), (Walk(0, place, 0, shared, first_table, first.row, last), *walks)))
    return strips
