import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.runner.attention.call import Sight
from foreword.runner.attention.tiles import TILE, Segment, cut, key_blocks, table

SIGHTS = st.one_of(
    st.just(Sight()),
    st.integers(1, 300).map(lambda window: Sight(window=window)),
    st.integers(1, 300).map(lambda chunk: Sight(chunk=chunk)),
)
SIZES = st.integers(1, 256)


def segment(start: int, count: int, block_size: int, row: int = 0) -> Segment:
    blocks = tuple(range(100, 100 + -(-(start + count) // block_size)))
    return Segment(row=row, start=start, count=count, blocks=blocks)


@given(start=st.integers(0, 900), count=st.integers(1, 400), size=SIZES, sight=SIGHTS)
def test_tiles_cover_the_segment_and_what_it_sees(start: int, count: int, size: int, sight: Sight) -> None:
    tiles = cut(segment(start, count, size, row=7), sight, size)
    assert [tile.start for tile in tiles] == [start, *((start // TILE + i) * TILE for i in range(1, len(tiles)))]
    assert sum(tile.count for tile in tiles) == count
    for tile in tiles:
        assert tile.row - 7 == tile.start - start
        queries = torch.arange(tile.start, tile.start + tile.count)
        assert int(queries[0]) // TILE == int(queries[-1]) // TILE
        seen = sight.visible(queries, torch.arange(start + count)).nonzero()[:, 1]
        first = tile.first_block * size
        assert first <= int(seen.min())
        assert int(seen.max()) < first + tile.num_blocks * size


@given(position=st.integers(0, 5000), back=st.integers(0, 63), size=SIZES, sight=SIGHTS)
def test_keys_follow_from_the_tile_alone(position: int, back: int, size: int, sight: Sight) -> None:
    """Whatever the chunk that holds a position, its tile reads the same keys."""
    start = max(position // TILE * TILE, position - back)
    alone = cut(segment(position, 1, size), sight, size)[0]
    longer = cut(segment(start, position - start + 100, size), sight, size)[0]
    assert (alone.first_block, alone.num_blocks) == (longer.first_block, longer.num_blocks)


@given(tile=st.integers(0, 2000), size=SIZES)
def test_at_most_a_quarter_more_keys_than_needed(tile: int, size: int) -> None:
    _, blocks = key_blocks(tile, Sight(), size)
    assert blocks * size <= (tile + 1) * TILE * 1.25 + size


@given(window=st.integers(1, 200))
def test_a_window_bounds_the_keys(window: int) -> None:
    _, blocks = key_blocks(10_000, Sight(window=window), 16)
    assert blocks * 16 <= (window + 2 * TILE + 16) * 1.25 + TILE


def test_padding_reads_the_null_block() -> None:
    assert table(segment(0, 40, 16), 1, 4, null_block=9) == (101, 102, 9, 9)


def test_fresh_tails() -> None:
    assert segment(0, 20, 16).fresh_tail(16) == (101, 4)
    assert segment(16, 1, 16).fresh_tail(16) == (101, 1)
    assert segment(17, 3, 16).fresh_tail(16) is None
    assert segment(0, 32, 16).fresh_tail(16) is None
    assert segment(15, 2, 16).fresh_tail(16) == (101, 1)


def test_sights() -> None:
    positions = torch.arange(6)
    assert torch.equal(Sight().visible(positions, positions), torch.ones(6, 6).tril().bool())
    assert Sight(window=2).visible(positions, positions).sum(-1).tolist() == [1, 2, 2, 2, 2, 2]
    assert Sight(chunk=3).visible(positions, positions).sum(-1).tolist() == [1, 2, 3, 1, 2, 3]
