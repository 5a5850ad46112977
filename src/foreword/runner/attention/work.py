"""What a paged kernel has to do in a step, as integers in one array, so that one copy carries them to the device.

Rows are cut into *strips*, one for each program of a kernel. `narrow` strips hold the few rows of a decode; `wide`
ones those of a prefill; `shared` ones the rows of sequences that attend to common blocks together (see `sharing`).
Nothing here depends on a layer: which keys of its strip a program reads, it works out from the layer's window.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foreword.runner.attention.sharing import Group
from foreword.runner.attention.tiles import Segment

STRIP_FIELDS = 7
MERGE_FIELDS = 2
STORE_ROWS = 16
"""Rows that are stored by one program; there is a slot for each of them, if only to say that there is none."""
_EVERYTHING = 2**30
"""A position from which every key is seen."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How many rows of the batch a strip holds."""

    narrow: int
    """0: all strips are wide."""
    wide: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of everything there is place for, so that a captured graph finds each thing where it was."""

    rows: int
    narrow: int
    narrow_rows: int
    wide: int
    wide_rows: int
    shared: int = 0
    shared_rows: int = 0


@dataclass(slots=True)
class Strips:
    """Strips of one kind."""

    strips: list[int] = field(default_factory=list[int])
    """STRIP_FIELDS for each: first row, rows, position of the first row, end of its keys, keys to skip when they are
    attended to elsewhere, where its block table begins, number of its first row among the rows of this kind."""
    rows: list[int] = field(default_factory=list[int])
    """MERGE_FIELDS for each row of this kind: its row in the batch, and its number among the shared rows or -1."""

    @property
    def num_strips(self) -> int:
        """How many there are."""
        return len(self.strips) // STRIP_FIELDS

    @property
    def num_rows(self) -> int:
        """Rows in all of them."""
        return len(self.rows) // MERGE_FIELDS


@dataclass(slots=True)
class Work:
    """One step's work, for layers whose queries are grouped alike."""

    slots: list[int] = field(default_factory=list[int])
    """For each row of the batch: block * block_size + place in the block, where its key and value go."""
    narrow: Strips = field(default_factory=Strips)
    wide: Strips = field(default_factory=Strips)
    shared: Strips = field(default_factory=Strips)
    """Its first rows count among `members`, and what merges them stands with the other kinds."""
    members: list[int] = field(default_factory=list[int])
    """Rows of the batch that take part in a shared strip."""
    tables: list[int] = field(default_factory=list[int])

    def fits(self, room: Room) -> bool:
        """Whether `pack` would succeed."""
        pairs = (
            (len(self.slots), room.rows),
            (self.narrow.num_strips, room.narrow),
            (self.narrow.num_rows, room.narrow_rows),
            (self.wide.num_strips, room.wide),
            (self.wide.num_rows, room.wide_rows),
            (self.shared.num_strips, room.shared),
            (len(self.members), room.shared_rows),
        )
        return all(used <= there for used, there in pairs)

    def room(self) -> Room:
        """Just enough."""
        return Room(
            rows=len(self.slots),
            narrow=self.narrow.num_strips,
            narrow_rows=self.narrow.num_rows,
            wide=self.wide.num_strips,
            wide_rows=self.wide.num_rows,
            shared=self.shared.num_strips,
            shared_rows=len(self.members),
        )

    def pack(self, room: Room) -> "array[int]":
        """All integers but the block tables, each kind where `offsets` says; unused places hold what means nothing."""
        numbers = array("i")
        kinds = (
            (self.slots, -1),
            (self.narrow.strips, 0),
            (self.narrow.rows, -1),
            (self.wide.strips, 0),
            (self.wide.rows, -1),
            (self.shared.strips, 0),
            (self.members, 0),
        )
        for (used, nothing), end in zip(kinds, tuple(offsets(room).values())[1:], strict=True):
            numbers.extend(used)
            numbers.extend((nothing,) * (end - len(numbers)))
        return numbers


def offsets(room: Room) -> Mapping[str, int]:
    """Where each kind of integer begins in a packed array, and its end.

    All begin at multiples of 16 bytes: a kernel is compiled anew for a pointer that does not.
    """
    sizes = {
        "slots": -(-room.rows // STORE_ROWS) * STORE_ROWS,
        "narrow": room.narrow * STRIP_FIELDS,
        "narrow_rows": room.narrow_rows * MERGE_FIELDS,
        "wide": room.wide * STRIP_FIELDS,
        "wide_rows": room.wide_rows * MERGE_FIELDS,
        "shared": room.shared * STRIP_FIELDS,
        "members": room.shared_rows,
    }
    begins: dict[str, int] = {}
    place = 0
    for name, size in sizes.items():
        begins[name] = place
        place += -(-size // 4) * 4
    return {**begins, "end": place}


def plan_work(
    segments: Sequence[Segment], block_size: int, cutting: Cutting, groups: Sequence[Group] = (), key_tile: int = 1
) -> Work:
    """Cut the rows of a step. `groups` number the segments; what they share is cut down to whole `key_tile`s."""
    work = Work()
    skips: dict[int, int] = {}
    shared_numbers: dict[int, int] = {}
    begins: list[int] = []
    for segment in segments:
        begins.append(len(work.tables))
        work.tables.extend(segment.blocks)
        work.slots.extend(segment.slots(block_size))
    for group in groups:
        end = group.num_blocks * block_size // key_tile * key_tile
        if end:
            skips.update(dict.fromkeys(group.members, end))
            members = [(number, segments[number]) for number in group.members]
            _share(work, members, (end, begins[group.members[0]]), cutting.wide, shared_numbers)
    for number, segment in enumerate(segments):
        kind, queries = (work.narrow, cutting.narrow) if segment.count <= cutting.narrow else (work.wide, cutting.wide)
        shared = shared_numbers.get(number)
        for done in range(0, segment.count, queries):
            count = min(queries, segment.count - done)
            start = segment.start + done
            row = segment.row + done
            skip = skips.get(number, 0)
            kind.strips += (row, count, start, start + count, skip, begins[number], kind.num_rows)
            for i in range(count):
                kind.rows += (row + i, -1 if shared is None else shared + done + i)
    return work


def _share(
    work: Work,
    members: Sequence[tuple[int, Segment]],
    keys: tuple[int, int],
    queries: int,
    shared_numbers: dict[int, int],
) -> None:
    """Cut the rows of a group's members into strips; `keys` are their end and where the block table begins."""
    end, table = keys
    first = len(work.members)
    for number, segment in members:
        shared_numbers[number] = len(work.members)
        work.members.extend(range(segment.row, segment.row + segment.count))
    for place in range(first, len(work.members), queries):
        count = min(queries, len(work.members) - place)
        work.shared.strips += (place, count, _EVERYTHING, end, 0, table, place)
