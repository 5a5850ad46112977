"""Small steps on a CPU are recorded and replayed: the same bits, without the model's code."""

import logging
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import Sampling
from foreword.runner import loader
from foreword.runner.attention import llvm
from foreword.runner.attention.backend import Extent
from foreword.runner.batch import build as build_batch
from foreword.runner.native import machine
from foreword.runner.recorder import TapeRecorder, share
from foreword.runner.rowwise import Sum
from foreword.runner.runner import ModelRunner
from foreword.runner.tape import Tape
from foreword.schedule.plan import Chunk, Draw, Plan
from tests.runner.models import CONFIGS, SIZES, build, runner_around

DRAW = Draw(Sampling(max_tokens=64), 0)


def plan(*chunks: tuple[int, int, int], tokens: int = 128) -> Plan:
    """Steps of requests: who, from which position on, how many tokens; each has blocks of its own for `tokens`."""
    each = -(-tokens // 16)
    return Plan(
        0,
        tuple(
            Chunk(
                RequestId(str(who)),
                start,
                tuple((37 * who + 7 * at + 3) % SIZES["vocab_size"] for at in range(start, start + count)),
                tuple(BlockId(each * who + i) for i in range(-(-(start + count) // 16))),
                DRAW,
            )
            for who, start, count in chunks
        ),
    )


STEPS = (
    plan((0, 0, 40)),
    plan((1, 0, 9)),
    plan((2, 0, 80)),
    plan((3, 0, 17)),
    plan((0, 40, 1)),
    plan((0, 41, 1), (1, 9, 1), (2, 80, 1)),
    plan((3, 17, 1)),
    plan((0, 42, 1), (1, 10, 1), (2, 81, 1), (3, 18, 1)),
    plan((4, 0, 5), (2, 82, 1)),
    plan((4, 5, 20), (0, 43, 1)),
    plan((1, 11, 1), (3, 19, 1), (4, 25, 1)),
    plan((5, 0, 64)),
    plan((5, 64, 3), (4, 26, 2)),
    plan((4, 28, 1)),
)
"""Prefills, decodes, both together; sizes come again with other requests, positions and numbers of rows."""


def wide(family: str) -> Any:
    """A configuration with vectors of 32 numbers, as the kernels take them."""
    config = CONFIGS[family]()
    config.head_dim = 32
    return config


def logits(runner: ModelRunner, step: Plan) -> torch.Tensor:
    """As `execute` has them, of the rows that draw."""
    with torch.inference_mode():
        batch = build_batch(step.chunks, runner._room(step.num_tokens), None)
        found = None if runner._graphs is None else runner._graphs.run(batch)
        return (runner._forward(batch) if found is None else found)[: len(step.chunks)].clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3"])
def test_the_same_bits_as_step_by_step(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(wide(family), dtype)
    ours, theirs = runner_around(model), runner_around(model)
    assert ours.card.attention == "llvm"
    theirs.record(None)
    forwards = count_forwards(ours, monkeypatch)
    for step in STEPS:
        assert torch.equal(logits(ours, step), logits(theirs, step))
    assert torch.equal(ours.memory.buffer[:48], theirs.memory.buffer[:48])
    if dtype is torch.bfloat16 and machine.multiplies_tiles():
        assert len(forwards) == 4, f"two sizes are recorded and tried, and hold all 14 steps: {caplog.messages}"
    else:
        # Products by torch: what does not come out again to the bit is not replayed, and that is right as well.
        assert len(forwards) >= 7


def test_attention_of_another_kind_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_around(build(CONFIGS["llama"](), torch.bfloat16))
    assert runner.card.attention == "sdpa"  # of vectors of 16 numbers
    forwards = count_forwards(runner, monkeypatch)
    for step in STEPS:
        logits(runner, step)
    assert len(forwards) == len(STEPS)


def test_recording_can_be_done_without() -> None:
    runner = runner_around(build(CONFIGS["llama"](), torch.bfloat16))
    assert runner._graphs is not None
    runner.record(None)
    assert runner._graphs is None


def test_a_large_model_is_recorded_only_where_few_sizes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"](), torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(loader, "_RECORDED_BYTES", size - 1)
    assert (runner_around(model)._graphs is not None) == machine.multiplies_tiles()
    monkeypatch.setattr(machine, "multiplies_tiles", lambda: False)
    for limit, records in ((size, True), (size - 1, False)):
        monkeypatch.setattr(loader, "_RECORDED_BYTES", limit)
        assert (runner_around(model)._graphs is not None) == records


def test_other_weights_are_recorded_anew() -> None:
    runner, other = (runner_around(build(wide("llama"), torch.bfloat16, seed)) for seed in (0, 1))
    for step in STEPS[:5]:
        logits(runner, step)
    before = logits(runner, STEPS[4])
    runner.load_again = lambda: runner_around(build(wide("llama"), torch.bfloat16, 1))
    runner.reload()
    for step in STEPS[:5]:
        wanted = logits(other, step)
        assert torch.equal(logits(runner, step), wanted)
    assert not torch.equal(before, logits(runner, STEPS[4]))


def test_how_a_model_is_recorded_is_its_own_also_when_it_was_loaded_again() -> None:
    odd = wide("llama")
    odd.intermediate_size = 100  # of which no kernel of ours makes the product
    ours, theirs = build(wide("llama"), torch.bfloat16), build(odd, torch.bfloat16)
    for before, after, follows in ((ours, theirs, False), (theirs, ours, machine.multiplies_tiles())):
        runner, fresh, other = runner_around(before), runner_around(after), runner_around(after)
        runner.load_again = lambda fresh=fresh: fresh
        runner.reload()
        assert isinstance(runner._recorder, TapeRecorder)
        assert runner._recorder.follows == follows
        assert [torch.equal(logits(runner, step), logits(other, step)) for step in STEPS] == [True] * len(STEPS)


def test_more_blocks_than_there_is_room_for_run_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "_FIXED_BLOCKS", 3)
    runner = runner_around(build(wide("llama"), torch.bfloat16))
    forwards = count_forwards(runner, monkeypatch)
    for step in (plan((0, 0, 20)), plan((0, 20, 1)), plan((0, 21, 1))):
        logits(runner, step)
    recorded = len(forwards)
    logits(runner, plan((0, 22, 1)))
    assert len(forwards) == recorded, "it is replayed"
    logits(runner, plan((0, 23, 28)))
    logits(runner, plan((0, 51, 1)))  # a fourth block
    assert len(forwards) == recorded + 2


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("before", [1, 3])
def test_no_more_workers_replay_than_there_is_room_for(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size that was made ready when torch had fewer threads, each of which has its own memory in attention."""
    monkeypatch.setattr(llvm, "_FIXED_BLOCKS", 3)
    runner = runner_around(build(wide("llama"), torch.bfloat16))
    torch.set_num_threads(before)
    logits(runner, plan((0, 48, 1)))  # its fourth block
    torch.set_num_threads(3)
    logits(runner, plan((0, 0, 1)))
    assert tape_of(runner)._threads == before


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


TILED = pytest.mark.parametrize("follows", [True] if machine.multiplies_tiles() else [False])
"""Only where products are kernels of ours, a step of any size is replayed."""


@TILED
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_around_the_borders_of_sizes(family: str, monkeypatch: pytest.MonkeyPatch, *, follows: bool) -> None:
    """Many rows and then few, so that what was there before would show; and several who sample."""
    model = build(wide(family), torch.bfloat16)
    ours, theirs = (runner_around(model, blocks=320) for _ in range(2))
    theirs.record(None)
    forwards = count_forwards(ours, monkeypatch)
    assert isinstance(ours._recorder, TapeRecorder)
    assert ours._recorder.follows == follows
    sizes = (1031, 1, 38, 37, 36, 367, 2, 131, 132, 1030, 3)
    for size in sizes:
        step = plan((0, 0, size), tokens=1100)
        assert torch.equal(logits(ours, step), logits(theirs, step)), size
    for many in (40, 5, 38, 1):
        step = plan(*((who, 0, 1 + who % 3) for who in range(many)))
        assert torch.equal(logits(ours, step), logits(theirs, step)), many
    assert torch.equal(ours.memory.buffer, theirs.memory.buffer)
    if follows:
        assert forwards == [1031, 3, 37, 1, 131, 3, 367, 3], "four sizes, each recorded once and tried once on few rows"
        tape = tape_of(ours)
        assert tape._fitted == (1, 1), "of 37 rows just one was computed"
        if family == "llama":  # its heads are not turned round between products
            besides = int(tape._rows[:, 2].count_nonzero())
            assert besides == SIZES["num_hidden_layers"], "all launches but attention's follow rows"
        step = plan((0, 0, 1032), tokens=1100)
        assert torch.equal(logits(ours, step), logits(theirs, step))
        assert len(forwards) == 9, "a larger step runs as usual"


def test_what_changes_from_time_to_time_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(wide("llama"), torch.bfloat16)
    ours, theirs = runner_around(model), runner_around(model)
    theirs.record(None)
    really, times = ours._compute, count(1)
    monkeypatch.setattr(ours, "_compute", lambda *given: really(*given) * next(times))
    ours.record(TapeRecorder(follows=machine.multiplies_tiles()))
    found = logits(ours, plan((0, 0, 9)))
    tries = next(times) - 1
    assert torch.equal(found, logits(theirs, plan((0, 0, 9))) * tries), "it was computed as usual"
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "comes out differently" in warning


def test_rows_are_followed_only_where_those_of_one_token_lie_together() -> None:
    assert share((1, 37), 37) == share((37,), 37) == share((1, 1, 37, 1), 37) == 1
    assert share((1, 37, 9), 37) == 9
    assert share((1, 9, 37), 37) == share((74,), 37) == share((), 37) == share((1, 1), 37) == 0


def test_launches_have_as_many_rows_as_there_are_tokens_or_tokens_wanted() -> None:
    shapes = ((1, 37, 32), (41, 32), (37, 2, 32), (2, 37, 32), (5, 32))
    extent = Extent(rows=37, segments=41, longest=37)

    def work() -> torch.Tensor:
        return torch.cat([(torch.ones(shape) + torch.ones(shape)).flatten() for shape in shapes])

    tape = TapeRecorder(follows=True).record(work, extent)
    assert tape._rows.tolist() == [[1, 0, 0], [0, 1, 0], [2, 0, 0], [0, 0, 74], [0, 0, 5]]
    tape = TapeRecorder(follows=False).record(work, extent)
    assert tape._rows.tolist() == [[0, 0, 37], [0, 0, 41], [0, 0, 74], [0, 0, 74], [0, 0, 5]]


def test_nothing_else_of_a_model_is_as_long_as_a_step_that_is_recorded() -> None:
    for extent in TapeRecorder(follows=True).extents:
        assert extent.rows != extent.segments
        for size in (extent.rows, extent.segments):
            assert all(size % divisor for divisor in range(2, size)), f"{size} is no prime"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 37, 64), (3, 32), (1, 1000, 96)])
def test_a_sum_has_the_bits_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    add, out = Sum(), torch.empty_like(x)
    assert add.takes(x, y)
    add(x, y, out)
    assert torch.equal(out, x + y)


def test_sums_that_no_kernel_makes() -> None:
    add, x = Sum(), torch.ones(2, 64)
    others = (x[:1], x.half(), x.double(), torch.ones(64, 2).t(), torch.ones(2, 40), 1.0)
    assert not any(add.takes(x, other) or add.takes(other, x) for other in others)
    assert not add.takes(torch.ones(64), torch.ones(64))
    assert not add.takes(torch.ones(2, 40), torch.ones(2, 40))
    assert not add.takes(x.half(), x.half())


X = torch.arange(6.0)
SOME = Extent(rows=6, segments=6, longest=6)


def record(work: Callable[[], torch.Tensor], recorder: TapeRecorder | None = None) -> Callable[[], torch.Tensor]:
    """What plays it again."""
    tape = (recorder or TapeRecorder()).record(work, SOME)
    return lambda: tape.replay(6, 6)


def test_a_tape_reads_what_is_there_when_it_is_replayed() -> None:
    x = X.clone()

    def work() -> torch.Tensor:
        y = torch.empty(6)
        y.copy_(x)
        y[:3] += 1
        return (y.view(2, 3).t().contiguous() * 2)[x[:2].long()]

    replay = record(work)
    assert torch.equal(replay(), work())
    x.copy_(torch.tensor([1.0, 0.0, 5.0, 7.0, 9.0, 11.0]))
    assert torch.equal(replay(), work())


def test_what_was_there_before_stays_for_as_long_as_its_tape() -> None:
    """A launch knows where its operands lie, and holds none of them."""
    given = [torch.ones(2, 64)]
    seen = weakref.ref(given[0])
    replay = record(lambda: given[0] + given[0])
    given.clear()
    assert seen() is not None
    assert torch.equal(replay(), torch.full((2, 64), 2.0))
    del replay
    assert seen() is None


def test_a_sum_of_multiples_is_torchs() -> None:
    x, y = torch.ones(2, 64), torch.full((2, 64), 3.0)
    assert torch.equal(record(lambda: torch.add(x, y, alpha=2))(), torch.full((2, 64), 7.0))


def test_another_look_at_the_same_memory_costs_nothing() -> None:
    tape = TapeRecorder().record(lambda: X.view(2, 3).t()[1:], SOME)
    assert not tape._steps
    assert torch.equal(tape.replay(6, 6), X.view(2, 3).t()[1:])
    assert len(TapeRecorder().record(lambda: X.view(2, 3).t()[1:] * 2, SOME)._steps) == 1


@pytest.mark.parametrize(
    "work",
    [
        lambda: X * float(X.sum()),
        lambda: X[X > 3],
        lambda: X.nonzero(),
        lambda: X if X.any() else -X,
    ],
    ids=["a sum", "a mask", "places", "a choice"],
)
def test_what_looks_at_numbers_is_refused(work: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="looks at numbers"):
        record(work)


def test_what_a_step_writes_on_its_way_takes_little_memory() -> None:
    x = torch.ones(10, 96)

    def work() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = (torch.empty_like(y).copy_(y) + 1) + x
        return y

    recorder = TapeRecorder()
    replay = record(work, recorder)
    first = replay().clone()
    assert torch.equal(first, torch.full((10, 96), 101.0))
    before = recorder.num_bytes
    assert 0 < before <= 4 * 4096, "a few of a hundred"
    again = record(work, recorder)
    assert recorder.num_bytes <= before + 4096, "the next tape uses the same, all but what comes out"
    x.fill_(2)
    assert torch.equal(replay(), again())


def tape_of(runner: ModelRunner) -> Tape:
    """Of the least size."""
    assert runner._graphs is not None
    frame = runner._graphs._frames[runner._graphs._extents[0]]
    assert frame is not None
    assert isinstance(frame.recorded, Tape)
    return frame.recorded


def count_forwards(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each, from now on."""
    forwards: list[int] = []
    really = runner._compute

    def counted(ids: torch.Tensor, *further: Any) -> torch.Tensor:
        forwards.append(ids.shape[1])
        return really(ids, *further)

    monkeypatch.setattr(runner, "_compute", counted)
    recorder = runner._recorder
    assert isinstance(recorder, TapeRecorder)
    runner.record(TapeRecorder(follows=recorder.follows))
    return forwards
