import pytest

from foreword.base.errors import InvariantBroken
from foreword.base.ids import PENDING_TOKEN, BlockId, RequestId
from foreword.base.params import Sampling
from foreword.cache.orders import Copy
from foreword.engine.sockets import Runner
from foreword.runner.runner import ModelRunner
from foreword.schedule.plan import Chunk, Draw, Plan, StepResult
from tests.runner.models import CONFIGS, build, runner_around

GREEDY = Draw(Sampling(max_tokens=9), 0)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_around(build(CONFIGS["llama"]()), blocks=12)


def chunk(name: str, start: int, *tokens: int, first_block: int = 0, draw: Draw | None = GREEDY) -> Chunk:
    blocks = tuple(BlockId(first_block + i) for i in range((start + len(tokens) - 1) // 16 + 1))
    return Chunk(RequestId(name), start, tokens, blocks, draw)


def test_it_fits_the_socket(runner: ModelRunner) -> None:
    socket: Runner = runner
    assert isinstance(socket.launch(Plan(0, (chunk("a", 0, 5, 6),))).land(), StepResult)
    assert socket.depth == (2 if runner.memory.buffer.device.type == "cuda" else 1)


def test_only_chunks_that_draw_bring_a_sample(runner: ModelRunner) -> None:
    plan = Plan(
        1, (chunk("a", 0, 5, 6), chunk("b", 0, 7, 8, 9, first_block=1, draw=None), chunk("c", 0, 5, 6, first_block=2))
    )
    samples = runner.launch(plan).land().samples
    assert set(samples) == {"a", "c"}
    assert samples[RequestId("a")] == samples[RequestId("c")]


def test_nobody_draws(runner: ModelRunner) -> None:
    assert runner.launch(Plan(1, (chunk("a", 0, 5, 6, draw=None),))).land().samples == {}


def test_copies_come_before_chunks(runner: ModelRunner) -> None:
    runner.launch(Plan(1, (chunk("a", 0, *range(5, 21)),))).land()
    expected = runner.launch(Plan(2, (chunk("a", 10, 40, 41, first_block=0),))).land().samples[RequestId("a")]
    runner.launch(Plan(3, (chunk("a", 0, *range(5, 21)),))).land()
    plan = Plan(4, (chunk("b", 10, 40, 41, first_block=4),), (Copy(BlockId(0), BlockId(4), 10),))
    assert runner.launch(plan).land().samples[RequestId("b")] == expected


def test_a_pending_token_is_the_one_drawn_last(runner: ModelRunner) -> None:
    first = runner.launch(Plan(1, (chunk("p", 0, 5, 6, 7),))).land().samples[RequestId("p")].token
    pending = runner.launch(Plan(2, (chunk("p", 3, PENDING_TOKEN),))).land().samples[RequestId("p")]
    again = runner.launch(Plan(3, (chunk("q", 0, 5, 6, 7, first, first_block=1),))).land().samples[RequestId("q")]
    assert pending == again


def test_a_token_that_was_never_drawn(runner: ModelRunner) -> None:
    with pytest.raises(InvariantBroken, match="stranger"):
        runner.launch(Plan(1, (chunk("stranger", 3, PENDING_TOKEN),)))
    runner.launch(Plan(1, (chunk("p", 0, 5, 6, 7),)))
    runner.launch(Plan(2, (chunk("q", 0, 5, 6, 7, first_block=1),)))
    with pytest.raises(InvariantBroken, match="the step before"):
        runner.launch(Plan(3, (chunk("p", 3, PENDING_TOKEN),)))


def test_the_same_plan_draws_the_same(runner: ModelRunner) -> None:
    draws = [Draw(Sampling(max_tokens=9, temperature=1.0, seed=4), index) for index in range(20)]
    first = [runner.launch(Plan(1, (chunk("a", 0, 5, 6, draw=d),))).land().samples[RequestId("a")].token for d in draws]
    again = [runner.launch(Plan(1, (chunk("a", 0, 5, 6, draw=d),))).land().samples[RequestId("a")].token for d in draws]
    assert first == again
    assert len(set(first)) > 1


def test_a_plan_out_of_memory_raises(runner: ModelRunner) -> None:
    for block in (99, runner.num_blocks, -1):
        with pytest.raises(IndexError):
            runner.launch(Plan(1, (chunk("a", 0, 5, first_block=block),))).land()
