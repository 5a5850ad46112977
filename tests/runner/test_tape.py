"""Small steps on a CPU are recorded and replayed: the same bits, without the model's code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import Sampling
from foreword.runner import loader
from foreword.runner.attention import llvm
from foreword.runner.batch import build as build_batch
from foreword.runner.native import machine
from foreword.runner.runner import ModelRunner
from foreword.runner.tape import TapeRecorder
from foreword.schedule.plan import Chunk, Draw, Plan
from tests.runner.models import CONFIGS, SIZES, build, runner_around

DRAW = Draw(Sampling(max_tokens=64), 0)


def plan(*chunks: tuple[int, int, int]) -> Plan:
    """Steps of requests: who, from which position on, how many tokens; each has eight blocks of its own."""
    return Plan(
        0,
        tuple(
            Chunk(
                RequestId(str(who)),
                start,
                tuple((37 * who + 7 * at + 3) % SIZES["vocab_size"] for at in range(start, start + count)),
                tuple(BlockId(8 * who + i) for i in range(-(-(start + count) // 16))),
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
        assert len(forwards) == 7, f"of 14 steps 7 are replayed, and one does not fit any size: {caplog.messages}"
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


def test_a_large_model_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"](), torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
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


def test_more_blocks_than_there_is_room_for_run_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "_FIXED_BLOCKS", 3)
    runner = runner_around(build(wide("llama"), torch.bfloat16))
    forwards = count_forwards(runner, monkeypatch)
    for step in (plan((0, 0, 40)), plan((0, 40, 1)), plan((0, 41, 1))):
        logits(runner, step)
    assert len(forwards) == 2
    logits(runner, plan((0, 42, 8)))
    logits(runner, plan((0, 50, 1)))  # a fourth block
    assert len(forwards) == 4


X = torch.arange(6.0)


def test_a_tape_reads_what_is_there_when_it_is_replayed() -> None:
    x = X.clone()

    def work() -> torch.Tensor:
        y = torch.empty(6)
        y.copy_(x)
        y[:3] += 1
        return (y.view(2, 3).t().contiguous() * 2)[x[:2].long()]

    tape = TapeRecorder().record(work)
    first = tape.replay().clone()
    assert torch.equal(first, work())
    x.copy_(torch.tensor([1.0, 0.0, 5.0, 7.0, 9.0, 11.0]))
    assert torch.equal(tape.replay(), work())


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
        TapeRecorder().record(work)


def test_what_a_step_writes_on_its_way_takes_little_memory() -> None:
    x = torch.ones(1000)

    def work() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = torch.empty_like(y).copy_(y) + 1
        return y

    recorder = TapeRecorder()
    tape = recorder.record(work)
    first = tape.replay().clone()
    assert torch.equal(first, torch.full((1000,), 51.0))
    before = recorder.num_bytes
    assert 0 < before <= 4 * 4096, "a few of fifty"
    again = recorder.record(work)
    assert recorder.num_bytes <= before + 4096, "the next tape uses the same, all but what comes out"
    x.fill_(2)
    assert torch.equal(tape.replay(), again.replay())


def test_what_does_not_come_out_again_is_refused() -> None:
    x = X.clone()

    def counting() -> torch.Tensor:
        x.add_(1)
        return x * 1

    with pytest.raises(RuntimeError, match="comes out differently"):
        TapeRecorder().record(counting)


def count_forwards(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    forwards: list[int] = []
    really = runner._compute

    def counted(*arguments: Any) -> torch.Tensor:
        forwards.append(1)
        return really(*arguments)

    monkeypatch.setattr(runner, "_compute", counted)
    runner.record(TapeRecorder())
    return forwards
