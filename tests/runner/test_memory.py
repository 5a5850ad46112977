import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from foreword.base.config import CacheConfig
from foreword.base.errors import ConfigError
from foreword.base.ids import BlockId
from foreword.cache.orders import Copy
from foreword.runner.copies import apply_copies, clear_tails
from foreword.runner.layout import LayerShape, lay_out
from foreword.runner.memory import KVMemory, count_blocks

ALIKE = (LayerShape(kv_heads=3, key_dim=8, value_dim=8),) * 2
MIXED = (
    LayerShape(kv_heads=2, key_dim=12, value_dim=8),
    LayerShape(kv_heads=4, key_dim=4, value_dim=4),
    LayerShape(kv_heads=1, key_dim=16, value_dim=4),
)
CPU = torch.device("cpu")


def memory(shapes: tuple[LayerShape, ...], block_size: int = 5, blocks: int = 4) -> KVMemory:
    return KVMemory(lay_out(shapes, block_size), blocks, torch.float32, CPU)


@pytest.mark.parametrize("shapes", [ALIKE, MIXED])
def test_pieces_tile_the_block(shapes: tuple[LayerShape, ...]) -> None:
    layout = lay_out(shapes, 5)
    pieces = sorted((*layout.keys, *layout.values), key=lambda piece: piece.offset)
    place = 0
    for piece in pieces:
        assert piece.offset == place
        assert piece.dim % layout.unit == 0
        place += piece.heads * piece.dim * 5
    assert place == layout.span == 5 * sum(shape.width for shape in shapes)
    assert sum(band.heads * band.dim for band in layout.bands) * 5 == layout.span


def test_one_band_where_all_layers_are_alike() -> None:
    assert len(lay_out(ALIKE, 5).bands) == 1
    assert len(lay_out(MIXED, 5).bands) == 5


def test_nothing_to_lay_out() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        lay_out((), 16)


@pytest.mark.parametrize("shapes", [ALIKE, MIXED])
def test_what_is_written_is_read(shapes: tuple[LayerShape, ...]) -> None:
    kv = memory(shapes)
    table = [2, 0, 3]
    positions = torch.arange(13)
    blocks, offsets = torch.tensor(table)[positions // 5], positions % 5
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, (key, value) in enumerate(zip(kv.layout.keys, kv.layout.values, strict=True)):
        states = torch.randn(key.heads, 13, key.dim), torch.randn(value.heads, 13, value.dim)
        kv.write(layer, kv.places(layer, blocks, offsets), *states)
        written.append(states)
        for view, state in zip((kv.keys(layer), kv.values(layer)), states, strict=True):
            assert view.shape == (5, 5, state.shape[0], state.shape[2])
            assert torch.equal(view[blocks, offsets], state.transpose(0, 1))
    for layer, states in enumerate(written):
        for found, state in zip(
            kv.read(layer, kv.runs(layer, torch.tensor([[*table, kv.null_block]])), 4), states, strict=True
        ):
            assert found.shape == (1, state.shape[0], 20, state.shape[2])
            assert torch.equal(found[0, :, :13], state)
            assert not found[:, :, 13:].any()


def test_a_table_for_each_sequence() -> None:
    kv = memory(ALIKE)
    kv.buffer[:-1] = torch.randn(4, kv.layout.span)
    # Row numbers made for one layer fit another of the same shape.
    _, found = kv.read(1, kv.runs(0, torch.tensor([[1, 2], [3, 0]])), 2)
    for row, table in enumerate(((1, 2), (3, 0))):
        expected = torch.cat([kv.values(1)[block] for block in table])
        assert torch.equal(found[row], expected.transpose(0, 1))


def test_memory_is_zero_and_not_touched() -> None:
    layout = lay_out((LayerShape(kv_heads=8, key_dim=64, value_dim=64),), 16)
    before = resident()
    kv = KVMemory(layout, 60_000, torch.bfloat16, CPU)
    assert kv.buffer.nbytes > 1.9e9
    assert not kv.buffer[31_000].any()
    assert resident() - before < 50e6


def test_some_of_what_is_next_gets_its_pages_while_nobody_waits() -> None:
    layout = lay_out((LayerShape(kv_heads=8, key_dim=64, value_dim=64),), 16)
    kv = KVMemory(layout, 60_000, torch.bfloat16, CPU)
    kv.buffer[:2] = 7
    portion, able = 2 * 2**20, can_populate()
    assert sum(iter(kv.prepare, False)) == 30 * able, "a thirty-second of the whole, 61 MB"
    assert present(kv, portion, 30 * portion) == able
    assert present(kv, 32 * portion, 900 * portion) == 0
    kv.reach(4096 + 70)
    kv.reach(70)
    assert sum(iter(kv.prepare, False)) == 30 * able, "behind the last block in use, and no page twice"
    assert present(kv, 65 * portion, 95 * portion) == able
    assert present(kv, 32 * portion, 63 * portion) == present(kv, 97 * portion, 900 * portion) == 0
    assert not kv.buffer[2:9000].any()
    assert (kv.buffer[:2] == 7).all()


def test_of_a_large_memory_no_more_is_got_ahead() -> None:
    layout = lay_out((LayerShape(kv_heads=8, key_dim=64, value_dim=64),), 16)
    kv = KVMemory(layout, 140_000, torch.bfloat16, CPU)
    assert sum(iter(kv.prepare, False)) == 64 * can_populate(), "128 MiB of 4.3 GiB"


def test_no_page_behind_the_last_block_is_asked_for() -> None:
    kv = memory(ALIKE)
    assert kv.prepare() == can_populate()
    assert not kv.prepare()
    kv.reach(3)
    assert not kv.prepare()


def test_a_system_that_cannot_give_pages_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.runner.memory._POPULATE_WRITE", 9999)
    kv = memory(ALIKE)
    assert not kv.prepare()
    kv.buffer[:] = 1
    assert not kv.prepare()


def can_populate() -> bool:
    """Whether this system knows MADV_POPULATE_WRITE (Linux since 5.14)."""
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(23)
    except OSError:
        return False
    return True


def present(kv: KVMemory, first: int, end: int) -> float:
    """Which part of these bytes has its pages: what the system says of this memory alone."""
    told = ctypes.create_string_buffer((end - first) // mmap.PAGESIZE)
    place = ctypes.c_void_p(kv.buffer.data_ptr() + first)
    assert ctypes.CDLL(None).mincore(place, ctypes.c_size_t(end - first), told) == 0
    return sum(byte & 1 for byte in told.raw) / len(told)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


@pytest.mark.parametrize("shapes", [ALIKE, MIXED])
def test_copies_read_before_they_write(shapes: tuple[LayerShape, ...]) -> None:
    kv = memory(shapes)
    kv.buffer[:-1] = torch.randn(4, kv.layout.span)
    old = [kv.keys(1).clone(), kv.values(0).clone()]
    apply_copies(
        kv, (Copy(BlockId(0), BlockId(1), 5), Copy(BlockId(1), BlockId(2), 3), Copy(BlockId(2), BlockId(0), 5))
    )
    for view, before in zip((kv.keys(1), kv.values(0)), old, strict=True):
        assert torch.equal(view[1], before[0])
        assert torch.equal(view[0], before[2])
        assert torch.equal(view[2][:3], before[1][:3])
        assert not view[2][3:].any()
        assert torch.equal(view[3], before[3])


def test_tails_are_cleared() -> None:
    kv = memory(MIXED)
    kv.buffer[:-1] = float("nan")
    clear_tails(kv, [(2, 3)])
    for layer in range(3):
        assert kv.keys(layer)[2, :3].isnan().all()
        assert not kv.values(layer)[2, 3:].any()
    assert kv.buffer[1].isnan().all()


@pytest.mark.parametrize(("text", "blocks"), [("64", 64), ("1MB", 1000), ("1KiB", 1), ("1999B", 1)])
def test_what_kv_cache_buys(text: str, blocks: int) -> None:
    assert count_blocks(CacheConfig(kv_cache=text), 1000, CPU) == blocks


def test_less_than_a_block() -> None:
    with pytest.raises(ConfigError, match="one block of this model needs 1000"):
        count_blocks(CacheConfig(kv_cache="999B"), 1000, CPU)


def test_auto_leaves_room() -> None:
    size = count_blocks(CacheConfig(), 2**20, CPU) * 2**20
    assert 2**20 <= size <= 4 * 2**30
