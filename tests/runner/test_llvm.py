"""The CPU's own paged attention kernel: right on every kind of layer, and a row's bits are its own."""

from dataclasses import replace

import pytest
import torch

from foreword.runner.attention import llvm
from foreword.runner.attention.call import Sight
from foreword.runner.attention.strips import cut
from foreword.runner.attention.tiles import Segment
from foreword.runner.native import machine
from foreword.runner.native.form import CHUNK
from tests.runner.paged import Layer, Scene

LAYERS = {
    "plain": Layer(key_dim=32, value_dim=32),
    "three heads share": Layer(heads=9, kv_heads=3, key_dim=64, value_dim=64),
    "many heads share": Layer(heads=16, kv_heads=1, key_dim=32, value_dim=32),
    "window, cap, sinks": Layer(
        heads=8, kv_heads=2, key_dim=64, value_dim=64, sight=Sight(window=40), softcap=5.0, sinks=True
    ),
    "chunks, wide": Layer(heads=4, kv_heads=1, key_dim=256, value_dim=256, sight=Sight(chunk=32)),
    "unlike dims": Layer(heads=4, kv_heads=4, key_dim=96, value_dim=64),
}
CHUNKS = ((0, 100), (70, 1), (33, 20), (200, 1), (130, 64), (63, 2))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_it_agrees_with_the_formula(name: str, dtype: torch.dtype) -> None:
    scene = Scene([LAYERS[name]], dtype)
    assert llvm.obstacle(scene.ground) is None
    segments = scene.segments(*CHUNKS)
    rows = sum(count for _, count in CHUNKS)
    (call,) = scene.calls(rows + 6)
    out = llvm.make(scene.ground).begin(segments, rows + 6).attend(call)
    torch.testing.assert_close(out[:rows].float(), scene.expected(call, segments)[:rows], atol=TOLERANCE[dtype], rtol=0)
    assert not out[rows:].any(), "padding is zero"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("factor", [0.0, 8.0, 100.0])
def test_scores_alike_and_far_apart(factor: float, dtype: torch.dtype) -> None:
    """Sums are rescaled when the highest score has risen by much: never, now and then, at most chunks."""
    scene = Scene([LAYERS["three heads share"]], dtype)
    segments = scene.segments((0, 400), (390, 1))
    (call,) = scene.calls(401)
    call = replace(call, query=call.query * factor)
    out = llvm.make(scene.ground).begin(segments, 401).attend(call)
    atol = 1e-4 if dtype is torch.float32 else TOLERANCE[dtype]  # scores of hundreds have few digits left
    torch.testing.assert_close(out.float(), scene.expected(call, segments), atol=atol, rtol=0)


@pytest.mark.parametrize("size", [32, 64])
def test_larger_blocks(size: int) -> None:
    scene = Scene([LAYERS["three heads share"]], torch.bfloat16, size=size)
    segments = scene.segments(*CHUNKS)
    rows = sum(count for _, count in CHUNKS)
    (call,) = scene.calls(rows)
    out = llvm.make(scene.ground).begin(segments, rows).attend(call)
    torch.testing.assert_close(out.float(), scene.expected(call, segments), atol=2e-2, rtol=0)


def test_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "multiplies_tiles", lambda: False)
    scene = Scene([LAYERS["window, cap, sinks"]], torch.bfloat16)
    backend = llvm.make(scene.ground)
    assert backend.ingredient == "llvm, single 2"
    segments = scene.segments(*CHUNKS)
    rows = sum(count for _, count in CHUNKS)
    (call,) = scene.calls(rows)
    out = backend.begin(segments, rows).attend(call)
    torch.testing.assert_close(out.float(), scene.expected(call, segments), atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_a_rows_bits_are_its_own(name: str, dtype: torch.dtype) -> None:
    """A prompt whole, in pieces, each row alone, and each row beside strangers: equal in every bit."""
    scene = Scene([LAYERS[name]], dtype)
    backend = llvm.make(scene.ground)
    mine, stranger = scene.segments((0, 150), (90, 3))
    (call,) = scene.calls(153)
    whole = backend.begin((mine, stranger), 153).attend(call)[:150]
    assert whole.float().std() > 0.01

    def part(first: int, count: int, *, company: bool) -> torch.Tensor:
        """Some of the rows, after the rest have been stored."""
        rows = list(range(first, first + count)) + ([150, 151, 152] if company else [])
        segments = [Segment(0, first, count, mine.blocks)]
        if company:
            segments.append(replace(stranger, row=count))
        index = torch.tensor(rows)
        states = {name: getattr(call, name).index_select(1, index) for name in ("query", "key", "value")}
        return backend.begin(tuple(segments), len(rows)).attend(replace(call, **states))[:count]

    for pieces in ((7, 143), (64, 86), (100, 49, 1)):
        first = 0
        for count in pieces:
            assert torch.equal(part(first, count, company=True), whole[first : first + count])
            first += count
    for row in (0, 1, 15, 16, 63, 64, 65, 127, 128, 149):
        assert torch.equal(part(row, 1, company=False), whole[row : row + 1])
        assert torch.equal(part(row, 1, company=True), whole[row : row + 1])


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYERS)
def test_company_on_shared_blocks_does_not_show(
    name: str, dtype: torch.dtype, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that go by the same keys together get what each gets alone, to the bit."""
    if not tiles:
        monkeypatch.setattr(machine, "multiplies_tiles", lambda: False)
    scene = Scene([LAYERS[name]], dtype)
    backend = llvm.make(scene.ground)
    segments = scene.segments((150, 1), (141, 1), (145, 5), (128, 1), (147, 7), (64, 2), (190, 1), shared=128)
    (call,) = scene.calls(18)
    strips = cut(segments, backend.positions[0], scene.size, CHUNK)
    assert max(len(strip.parts) for strip in strips) > 1
    together = backend.begin(segments, 18).attend(call)
    torch.testing.assert_close(together.float(), scene.expected(call, segments), atol=TOLERANCE[dtype], rtol=0)
    for segment in segments:
        rows = slice(segment.row, segment.row + segment.count)
        states = {name: getattr(call, name)[:, rows] for name in ("query", "key", "value")}
        alone = backend.begin((replace(segment, row=0),), segment.count).attend(replace(call, **states))
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sight", [Sight(window=24), Sight(window=100), Sight(chunk=32)], ids=str)
@pytest.mark.parametrize("chunks", [((128, 38), (129, 2)), ((200, 40), (210, 5), (128, 32))], ids=str)
def test_each_of_several_pieces_sees_through_its_own_window(
    chunks: tuple[tuple[int, int], ...], sight: Sight, dtype: torch.dtype, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of many rows ends after the next one begins: the sight of what comes later may begin earlier."""
    if not tiles:
        monkeypatch.setattr(machine, "multiplies_tiles", lambda: False)
    scene = Scene([Layer(key_dim=32, value_dim=32, sight=sight)], dtype)
    backend = llvm.make(scene.ground)
    segments, rows = scene.segments(*chunks, shared=128), sum(count for _, count in chunks)
    (call,) = scene.calls(rows)
    assert max(len(strip.parts) for strip in cut(segments, backend.positions[0], scene.size, CHUNK)) > 1
    together = backend.begin(segments, rows).attend(call)
    torch.testing.assert_close(together.float(), scene.expected(call, segments), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_one_sharer_has_spoilt_reaches_no_other(dtype: torch.dtype) -> None:
    scene = Scene([LAYERS["three heads share"]], dtype)
    backend = llvm.make(scene.ground)
    segments = scene.segments((150, 1), (140, 1), (133, 2), shared=128)
    (call,) = scene.calls(4)
    clean = backend.begin(segments, 4).attend(call)
    spoilt = call.value.clone()
    spoilt[:, 1] = float("nan")
    found = backend.begin(segments, 4).attend(replace(call, value=spoilt))
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])


def test_threads_do_not_show() -> None:
    scene = Scene([LAYERS["three heads share"]], torch.bfloat16)
    backend = llvm.make(scene.ground)
    segments = scene.segments((0, 100), (130, 64), (20, 1))
    (call,) = scene.calls(165)
    before = torch.get_num_threads()
    found: list[torch.Tensor] = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(backend.begin(segments, 165).attend(call))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_other_numbers_than_it_keeps_are_refused(which: str) -> None:
    """The kernel takes what lies there as numbers of its own kind, so it would read and write past the end."""
    scene = Scene([LAYERS["plain"]], torch.bfloat16)
    (call,) = scene.calls(20)
    step = llvm.make(scene.ground).begin(scene.segments((0, 20)), 20)
    step.attend(call)
    with pytest.raises(RuntimeError, match=r"not torch\.bfloat16"):
        step.attend(replace(call, **{which: getattr(call, which).float()}))


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = LAYERS["plain"]
    assert "not in float16" in str(llvm.obstacle(Scene([usual], torch.float16).ground))
    assert "a block has 8" in str(llvm.obstacle(Scene([usual], size=8).ground))
    odd = Scene([Layer(key_dim=40, value_dim=32)])
    assert "40 and 32 numbers, not a multiple of 16" in str(llvm.obstacle(odd.ground))
    monkeypatch.setattr(machine, "is_there", lambda: False)
    assert llvm.obstacle(Scene([usual]).ground) == "llvmlite cannot be loaded"
