"""Which recorded size a step goes to, and that a replay computes what the step would: recorded by a stand-in."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import Sampling
from foreword.runner.attention.backend import Extent, Ground
from foreword.runner.attention.tiles import Segment
from foreword.runner.attention.triton import TritonBackend, room_for
from foreword.runner.attention.work import Cutting
from foreword.runner.graphs import Recorded, holding, ladder
from foreword.runner.runner import ModelRunner
from foreword.runner.survey import survey
from foreword.schedule.plan import Chunk, Draw, Plan
from tests.parity.desk import Desk, random_tokens
from tests.runner.models import CONFIGS, build, own_answer, runner_around
from tests.runner.paged import DEVICE


class Tape:
    """Records by remembering what to do; doing it again reads the same buffers."""

    extents = ladder()
    checked, follows = False, False

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.breaks = False

    def record(self, work: Callable[[], Tensor], extent: Extent) -> Recorded:
        if self.breaks:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1
        work()
        return Again(self, work)


class Again:
    def __init__(self, tape: Tape, work: Callable[[], Tensor]) -> None:
        self.tape, self.work = tape, work

    def replay(self, rows: int, wanted: int) -> Tensor:
        self.tape.replayed += 1
        return self.work()


def segments(*counts: int) -> tuple[Segment, ...]:
    return tuple(Segment(sum(counts[:i]), 5, count, (i,)) for i, count in enumerate(counts))


def held(*counts: int) -> list[tuple[int, int, bool]]:
    return [(extent.rows, extent.longest, extent.shared) for extent in holding(ladder(), segments(*counts))]


def test_the_least_size_comes_first() -> None:
    assert held(1)[0] == (1, 1, False)
    assert held(*[1] * 5) == [(8, 1, False), (8, 1, True), (16, 1, False)]
    assert held(24)[0] == (32, 32, False)
    assert held(200, 1)[0] == (256, 256, False)
    assert held(*[1] * 256)[0] == (256, 1, False)


def test_what_no_size_holds() -> None:
    assert held(257) == []
    assert held(*[1] * 257) == []
    assert held(*[2] * 9) == [], "prefills come in few segments"
    assert held(*[2] * 8) != []


def test_room_for_any_step_of_a_size() -> None:
    cutting = Cutting(narrow=4, wide=32)
    decode = room_for(Extent(rows=64, segments=64, longest=1, shared=True), cutting)
    assert (decode.narrow, decode.narrow_rows, decode.wide, decode.wide_rows, decode.shared) == (64, 64, 0, 0, 16)
    prefill = room_for(Extent(rows=128, segments=8, longest=128), cutting)
    assert (prefill.narrow, prefill.wide, prefill.wide_rows, prefill.shared) == (8, 12, 128, 0)
    exact = room_for(Extent(rows=4, segments=4, longest=1), replace(cutting, narrow=0))
    assert (exact.narrow, exact.wide, exact.wide_rows) == (0, 5, 4)


@pytest.fixture
def recording() -> tuple[ModelRunner, Tape]:
    runner = runner_around(build(CONFIGS["llama"]()))
    ground = Ground(facts=survey("tiny", runner._model), memory=runner.memory)
    runner._backend = TritonBackend(ground, runner.memory, least_saved=64)
    runner._backend.num_programs = 1
    tape = Tape()
    runner.record(tape)
    return runner, tape


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compiled kernels take no host tensors")
def test_replays_answer_as_the_library_does(recording: tuple[ModelRunner, Tape]) -> None:
    runner, tape = recording
    model = build(CONFIGS["llama"]())
    desk = Desk(runner)
    head = random_tokens(64, seed=1)
    prompts = [head + random_tokens(3, seed=2), head + random_tokens(2, seed=3)]
    lines = [desk.open(prompts[0], room=8)]
    desk.answer(lines, 1)
    lines.append(desk.open(prompts[1], like=lines[0], reuse=4, room=8))
    assert (tape.recorded, tape.replayed) == (1, 1), "a short prefill"
    desk.answer(lines[1:], 1)
    answers = desk.answer(lines, 2)
    assert tape.replayed == 4
    assert tape.recorded == 3, "two prefills; both decodes share one, with room for what is shared"
    for prompt, line, answer in zip(prompts, lines, answers, strict=True):
        theirs = own_answer(model, prompt, 3)
        assert line.tokens[len(prompt) :][: len(theirs)] == theirs
        assert len(answer) == 2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compiled kernels take no host tensors")
def test_steps_that_are_recorded_say_so(recording: tuple[ModelRunner, Tape]) -> None:
    runner, tape = recording

    def recorded(start: int, count: int) -> bool:
        tokens = tuple(random_tokens(count, seed=start))
        chunk = Chunk(RequestId("a"), start, tokens, (BlockId(0), BlockId(1)), Draw(Sampling(max_tokens=9), 0))
        return runner.launch(Plan(0, (chunk,))).recording_s > 0

    assert [recorded(0, 5), recorded(5, 3), recorded(8, 1), recorded(9, 1)] == [True, False, True, False]
    tape.breaks = True
    assert [recorded(10, 20) for _ in range(5)] == [True, True, True, False, False], "three sizes are tried"
    assert tape.recorded == 2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compiled kernels take no host tensors")
def test_what_cannot_be_recorded_runs_as_usual(
    recording: tuple[ModelRunner, Tape], caplog: pytest.LogCaptureFixture
) -> None:
    runner, tape = recording
    tape.breaks = True
    model = build(CONFIGS["llama"]())
    desk = Desk(runner)
    prompt = random_tokens(5, seed=1)
    (answer,) = desk.answer([desk.open(prompt, room=8)], 2)
    theirs = own_answer(model, prompt, 2)
    assert answer[: len(theirs)] == theirs
    assert tape.replayed == 0
    assert [message.split(":")[0] for message in caplog.messages] == [
        "steps of 16 rows cannot be recorded and run one launch at a time",
        "steps of 1 row cannot be recorded and run one launch at a time",
    ]
