"""Models whose prefixes cannot be reused, through the whole engine: they answer as by themselves, and say why."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from foreword import LLM
from foreword.runner import library
from tests.runner.plain_models import BORDER, CONFIGS, answer, build, save

LENGTHS = (1, 2, 5, 17, 40, 58, BORDER - 1, BORDER, BORDER + 1, 90)
COUNT = 24
"""Tokens of an answer, so that some begin before the border of a model's angles and end behind it."""


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{length}/{seed}")
    return [source.randrange(5, 500) for _ in range(length)]


@pytest.fixture(scope="module", params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> nn.Module:
    return build(family)


@pytest.fixture(scope="module")
def llm(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save(model, tmp_path_factory.mktemp("plain"))
    with LLM(str(folder), device="cpu", dtype="float32", max_context=256, max_running=4, max_waiting=32) as made:
        yield made


def test_three_times_the_same_request(llm: LLM, model: nn.Module) -> None:
    tokens = prompt(58)
    expected = answer(model, tokens, COUNT)
    assert len(set(expected)) > 3, "an answer of one token proves little"
    for _ in range(3):
        [result] = llm.generate(tokens, max_tokens=COUNT, ignore_eos=True)
        assert list(result.token_ids) == expected
        assert (result.cached_tokens, result.reason) == (0, "model_not_cacheable")
        assert result.computed_tokens == result.prompt_tokens == 58


def test_mixed_with_others_of_other_lengths(llm: LLM, model: nn.Module) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    results = llm.generate(prompts, max_tokens=COUNT, ignore_eos=True)
    for tokens, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == answer(model, tokens, COUNT), f"a prompt of {len(tokens)}"
        assert (result.cached_tokens, result.reason) == (0, "model_not_cacheable")
    llm.assembly.worker.check()
    pool = llm.assembly.worker.state().pool
    assert (pool.free, pool.cached, pool.held) == (pool.total, 0, 0)


def test_a_step_that_fails_costs_a_rerun_and_no_answer(
    llm: LLM, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward fails while four answers are under way: all of them begin again, and none is another."""
    real, calls = library.forward_with_cache, list[int]()

    def fails_once(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 30:
            raise RuntimeError("planted")
        return real(*arguments)

    monkeypatch.setattr(library, "forward_with_cache", fails_once)
    prompts = [prompt(length, seed=1) for length in (58, 9, 31, BORDER)]
    results = llm.generate(prompts, max_tokens=COUNT, ignore_eos=True)
    assert len(calls) > 4 * COUNT
    for tokens, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == answer(model, tokens, COUNT)
    llm.assembly.worker.check()


def test_reload(llm: LLM, model: nn.Module) -> None:
    tokens, root = prompt(31, seed=2), llm.assembly.root
    assert llm.reload() == root.hex()
    [result] = llm.generate(tokens, max_tokens=4, ignore_eos=True)
    assert list(result.token_ids) == answer(model, tokens, 4)
    assert result.reason == "model_not_cacheable"


def test_it_is_said(llm: LLM, family: str) -> None:
    state = llm.assembly.effective
    assert state["cache"] is False
    assert llm.assembly.card.not_cacheable
    assert llm.assembly.card.exact


def test_an_operator_who_switched_the_cache_off_hears_that_first(
    model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LLM(str(save(model, tmp_path)), cache=False, kv_cache="2") as made:
        [result] = made.generate(prompt(5), max_tokens=1)
    assert result.reason == "cache_disabled"
    assert "prefixes are not reused, every prompt is computed whole" in caplog.text
