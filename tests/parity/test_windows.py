"""Tiny models with sliding windows, through the whole engine: after the window has passed they answer as by themselves.

All keys are kept and masked. So a hit may end anywhere, also where the window of the next token has long passed it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from foreword import LLM
from tests.parity.desk import random_tokens
from tests.runner.models import CONFIGS, WINDOW, build, own_answer
from tests.runner.plain_models import save

COUNT = 40
"""Tokens of an answer: more than the window, so that at its end the prompt is out of sight."""
assert COUNT > WINDOW


def made(family: str, window: int) -> Any:
    """A random model whose answers depend on what is seen; gemma3 has a layer between that sees all."""
    config = CONFIGS[family]()
    config.sliding_window, config.tie_word_embeddings = window, False
    if family == "gemma3":
        config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    model: Any = build(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(3)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return made(family, WINDOW)


@pytest.fixture(scope="module", params=[16, 4])
def llm(model: nn.Module, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Room for 288 tokens: one prompt with its answer, and half of another."""
    folder = save(model, tmp_path_factory.mktemp("windows"))
    settings: Any = {"block_size": request.param, "kv_cache": str(288 // request.param)}
    with LLM(str(folder), device="cpu", dtype="float32", **settings) as made:
        yield made


def ask(llm: LLM, tokens: list[int]) -> tuple[list[int], int]:
    [result] = llm.generate(tokens, max_tokens=COUNT, ignore_eos=True)
    return list(result.token_ids), result.cached_tokens


def generated(model: Any, tokens: list[int]) -> list[int]:
    return own_answer(model, tokens, COUNT)


def test_the_window_shows(model: Any, family: str) -> None:
    """Else nothing here would prove anything."""
    tokens = random_tokens(150, seed=1)
    answer = generated(model, tokens)
    assert len(set(answer)) > 5
    assert generated(made(family, 1000), tokens) != answer


def test_cold_warm_and_longer(llm: LLM, model: nn.Module) -> None:
    llm.assembly.worker.flush()
    tokens = random_tokens(150, seed=1)
    expected = generated(model, tokens)
    assert ask(llm, tokens) == (expected, 0)
    assert ask(llm, tokens) == (expected, len(tokens) - 1)
    longer = [*tokens, *expected[:-1], *random_tokens(9, seed=2)]
    size = llm.assembly.limits.block_size
    assert ask(llm, longer) == (generated(model, longer), (len(tokens) + COUNT - 1) // size * size)


@pytest.mark.parametrize("kept", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 70, 131])
def test_a_hit_may_end_anywhere(llm: LLM, model: nn.Module, kept: int) -> None:
    llm.assembly.worker.flush()
    tokens = random_tokens(140, seed=3)
    ask(llm, tokens)
    other = [*tokens[:kept], *random_tokens(60, seed=4)]
    assert ask(llm, other) == (generated(model, other), kept)


def test_blocks_are_evicted_and_come_back(llm: LLM, model: nn.Module) -> None:
    """The pool takes from the end of the first prompt for the second, then all of it for a third."""
    llm.assembly.worker.flush()
    cache = llm.assembly.worker._engine.scheduler.cache
    first, second, third = (random_tokens(length, seed=length) for length in (150, 151, 230))
    expected = [generated(model, tokens) for tokens in (first, second, third)]
    before = cache.num_evicted
    for _ in range(2):
        assert ask(llm, first)[0] == expected[0]
        assert ask(llm, second)[0] == expected[1]
        answer, cached = ask(llm, first)
        assert answer == expected[0]
        assert 0 < cached < len(first) - 1, "some of it was evicted, and some was not"
        assert ask(llm, third) == (expected[2], 0)
        assert ask(llm, first)[0] == expected[0]
    assert cache.num_evicted > before
    llm.assembly.worker.check()


def test_many_at_once(llm: LLM, model: nn.Module) -> None:
    """They take from each other: some begin again, and none answers otherwise."""
    prompts = [random_tokens(length, seed=9) for length in (150, 30, 97, 24, 25, 140, 3)]
    results = llm.generate(prompts, max_tokens=COUNT, ignore_eos=True)
    for tokens, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == generated(model, tokens)


def test_full_forward_is_the_oracle_too(llm: LLM, model: nn.Module) -> None:
    tokens, answer = random_tokens(100, seed=5), list[int]()
    for _ in range(6):
        with torch.inference_mode():
            ids = torch.tensor([[*tokens, *answer]])
            answer.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    assert ask(llm, tokens)[0][:6] == answer
