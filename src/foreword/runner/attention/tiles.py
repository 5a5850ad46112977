"""How the rows of a step are cut into attention work, once a step and not once a layer.

Queries are cut at absolute multiples of TILE, and a row reads its keys from and to bounds that follow from its own
tile alone: never from where its chunk began or ends. Hence which keys stand in which slot of a product is the same in
a prefill, in the second half of one, after a hit, or in a decode, and so are the bits of the result.
"""

from dataclasses import dataclass

from foreword.runner.attention.call import Sight

TILE = 64
"""Positions in a tile."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One chunk's rows in the ragged batch."""

    row: int
    """First row."""
    start: int
    """Absolute position of the first row."""
    count: int
    blocks: tuple[int, ...]
    """Block table from position 0 on."""

    def slots(self, block_size: int) -> list[int]:
        """For each row: block * block_size + place in the block, where its key and value go."""
        slots: list[int] = []
        position, end = self.start, self.start + self.count
        while position < end:
            block, place = divmod(position, block_size)
            until = min(end, (block + 1) * block_size)
            first = self.blocks[block] * block_size + place
            slots.extend(range(first, first + until - position))
            position = until
        return slots

    def fresh_tail(self, block_size: int) -> tuple[int, int] | None:
        """The last block and its first unwritten slot, if this segment is the first to write to that block."""
        end = self.start + self.count
        block, used = divmod(end - 1, block_size)
        if block * block_size < self.start or used + 1 == block_size:
            return None
        return self.blocks[block], used + 1


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one segment that lie in one tile."""

    row: int
    start: int
    count: int
    first_block: int
    """Index in the block table where the keys begin."""
    num_blocks: int
    """Blocks of keys to read; those past the table's end are null."""


def cut(segment: Segment, sight: Sight, block_size: int) -> tuple[Tile, ...]:
    """Cut a segment at tile borders, in order of position."""
    tiles: list[Tile] = []
    position, end = segment.start, segment.start + segment.count
    while position < end:
        tile = position // TILE
        until = min(end, (tile + 1) * TILE)
        first, num = key_blocks(tile, sight, block_size)
        row = segment.row + position - segment.start
        tiles.append(Tile(row=row, start=position, count=until - position, first_block=first, num_blocks=num))
        position = until
    return tuple(tiles)


def key_blocks(tile: int, sight: Sight, block_size: int) -> tuple[int, int]:
    """First block and number of blocks of keys for all rows of a tile."""
    first = sight.first_key(tile * TILE) // block_size
    return first, -(-_round_up((tile + 1) * TILE - first * block_size) // block_size)


def _round_up(keys: int) -> int:
    """Fewer distinct extents, so that decoding rows of different lengths share a product; at most a quarter more."""
    tiles = -(-keys // TILE)
    step = max(1, 1 << max(0, (tiles - 1).bit_length() - 3))
    return -(-tiles // step) * step * TILE


def table(segment: Segment, first: int, count: int, null_block: int) -> tuple[int, ...]:
    """`count` blocks of a segment's table from `first` on, filled up with the null block."""
    own = segment.blocks[first : first + count]
    return (*own, *(null_block,) * (count - len(own)))
