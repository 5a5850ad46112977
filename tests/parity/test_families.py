"""Tiny models of many families: paged, chunked, shared and batched, they answer as the library does by itself."""

import pytest
import torch

from foreword.runner.runner import ModelRunner
from tests.parity.desk import Desk, random_cuts, random_tokens
from tests.runner.models import CONFIGS, build, own_answer, own_logits, runner_around

SIZE = 16
CLOSE = 2e-5
"""Largest difference of any logit in float32; they are of order 1."""


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, ModelRunner]:
    model = build(CONFIGS[request.param]())
    return model, runner_around(model, block_size=SIZE, blocks=64)


Pair = tuple[torch.nn.Module, ModelRunner]


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max())


@pytest.mark.parametrize("length", [1, 2, SIZE - 1, SIZE, SIZE + 1, 4 * SIZE - 1, 4 * SIZE, 4 * SIZE + 1, 150])
def test_whole(pair: Pair, length: int) -> None:
    model, runner = pair
    tokens = random_tokens(length, seed=length)
    desk = Desk(runner)
    assert gap(desk.whole(desk.open(tokens), [length]), own_logits(model, tokens)) < CLOSE


def test_chunked(pair: Pair) -> None:
    model, runner = pair
    tokens = random_tokens(150, seed=3)
    theirs = own_logits(model, tokens)
    for seed in range(3):
        desk = Desk(runner)
        assert gap(desk.whole(desk.open(tokens), random_cuts(150, seed)), theirs) < CLOSE


@pytest.mark.parametrize("reuse", [1, 4, 5])
def test_after_a_hit(pair: Pair, reuse: int) -> None:
    model, runner = pair
    head = random_tokens(6 * SIZE, seed=4)
    first, second = head + random_tokens(9, seed=5), head[: reuse * SIZE] + random_tokens(21, seed=6)
    desk = Desk(runner)
    donor = desk.open(first)
    desk.whole(donor, [len(first)])
    line = desk.open(second, like=donor, reuse=reuse)
    assert gap(desk.whole(line, [21]), own_logits(model, second)[reuse * SIZE :]) < CLOSE


def test_batched(pair: Pair) -> None:
    model, runner = pair
    prompts = [random_tokens(count, seed=count) for count in (73, 36, 1, 64, 17)]
    desk = Desk(runner)
    lines = [desk.open(prompt) for prompt in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in lines]
    for step in ((48, 10, 1, 64, 1), (20, 25, 0, 0, 16), (1, 1, 0, 0, 0), (4, 0, 0, 0, 0)):
        parts = [(line, count) for line, count in zip(lines, step, strict=True) if count]
        for (line, _), logits in zip(parts, desk.logits(parts), strict=True):
            rows[lines.index(line)].append(logits)
    for prompt, parts in zip(prompts, rows, strict=True):
        assert gap(torch.cat(parts), own_logits(model, prompt)) < CLOSE


def test_greedy_as_generate(pair: Pair) -> None:
    model, runner = pair
    desk = Desk(runner)
    head = random_tokens(2 * SIZE, seed=8)
    first, second = head + random_tokens(30, seed=9), head + random_tokens(3, seed=10)
    one = desk.open(first, room=12)
    desk.logits([(one, 2 * SIZE)])
    two = desk.open(second, like=one, reuse=2, room=12)
    answers = desk.answer([one, two], 12)
    for prompt, answer in zip((first, second), answers, strict=True):
        theirs = own_answer(model, prompt, 12)
        assert answer[: len(theirs)] == theirs


@pytest.mark.parametrize("size", [1, 7, 40, 256])
def test_odd_block_sizes(size: int) -> None:
    model = build(CONFIGS["gemma3"]())
    desk = Desk(runner_around(model, block_size=size, blocks=600 // size + 8))
    tokens = random_tokens(150, seed=1)
    theirs = own_logits(model, tokens)
    assert gap(desk.whole(desk.open(tokens), [31, 1, 100, 18]), theirs) < CLOSE


def test_groups_are_split_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few sequences are gathered at once, and whether masks are stacked before or after, bits are the same."""
    from foreword.runner.attention import sdpa

    runner = runner_around(build(CONFIGS["mistral"]()), blocks=64)
    prompts = [random_tokens(40 + i, seed=i) for i in range(7)]

    def rows() -> torch.Tensor:
        desk = Desk(runner)
        lines = [desk.open(prompt) for prompt in prompts]
        desk.logits([(line, 38) for line in lines])
        return torch.cat(desk.logits([(line, 2) for line in lines]))

    usual = rows()
    monkeypatch.setattr(sdpa, "_GATHER_BYTES", 1)
    assert torch.equal(rows(), usual)
    monkeypatch.setattr(sdpa, "_STACKED_MASK_BYTES", 0)
    assert torch.equal(rows(), usual)
