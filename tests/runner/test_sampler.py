import math
from typing import Any

import pytest
import torch

from foreword.base.params import Sampling
from foreword.runner.sampler import sample, uniform
from foreword.schedule.plan import Draw


def draw(number: int = 0, **settings: Any) -> Draw:
    return Draw(Sampling(max_tokens=1, **settings), number)


def rows(count: int, width: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_zero_takes_the_best_of_each_row() -> None:
    logits = rows(4)
    assert [s.token for s in sample(logits, [draw()] * 4)] == logits.argmax(-1).tolist()


def test_no_rows() -> None:
    assert sample(rows(1), []) == []


def test_the_same_seed_and_index_draw_the_same() -> None:
    logits = rows(1).expand(40, -1)
    draws = [draw(number=i, temperature=1.0, seed=7) for i in range(40)]
    first = [s.token for s in sample(logits, draws)]
    assert first == [s.token for s in sample(logits, draws)]
    assert len(set(first)) > 1
    assert first != [s.token for s in sample(logits, [draw(number=i, temperature=1.0, seed=8) for i in range(40)])]


def test_a_draw_does_not_depend_on_company() -> None:
    logits = rows(6)
    draws = [draw(number=i, temperature=0.8, top_p=0.9, seed=i) for i in range(6)]
    together = [s.token for s in sample(logits, draws)]
    assert together == [sample(logits[i : i + 1], draws[i : i + 1])[0].token for i in range(6)]


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_limits_that_leave_one_token(limit: dict[str, float]) -> None:
    logits = rows(1)
    for index in range(20):
        settings: dict[str, float] = {"temperature": 1.0, "seed": 3, **limit}
        assert sample(logits, [draw(index, **settings)])[0].token == int(logits.argmax())


@pytest.mark.parametrize("settings", [{}, {"top_k": 49}, {"top_p": 0.99999}])
def test_frequencies_are_probabilities(settings: dict[str, float]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, *[-40.0] * 46])
    count = 4000
    draws = [draw(i, temperature=1.0, seed=1, **settings) for i in range(count)]
    found = torch.bincount(torch.tensor([s.token for s in sample(logits.expand(count, -1), draws)]), minlength=50)
    expected = torch.softmax(logits, -1)
    assert float((found / count - expected).abs().max()) < 0.03


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))
    seen = {sample(logits, [draw(i, temperature=1.0, top_p=0.7)])[0].token for i in range(300)}
    assert seen == {1, 2}
    seen = {sample(logits, [draw(i, temperature=1.0, top_p=0.71)])[0].token for i in range(300)}
    assert seen == {1, 2, 3}


def test_top_k() -> None:
    logits = rows(1)
    best = set(torch.topk(logits[0], 3).indices.tolist())
    assert {sample(logits, [draw(i, temperature=5.0, top_k=3)])[0].token for i in range(200)} == best


def test_top_k_wider_than_the_vocabulary() -> None:
    assert 0 <= sample(rows(1), [draw(temperature=1.0, top_k=1000)])[0].token < 50


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 10), -math.inf)
    logits[0, 4] = 0.0
    assert {sample(logits, [draw(i, temperature=2.0)])[0].token for i in range(50)} == {4}


def test_log_probabilities_are_of_the_model_whatever_the_temperature() -> None:
    logits = rows(1)
    expected = torch.log_softmax(logits[0], -1)
    [found] = sample(logits, [draw(temperature=3.0, seed=5, logprobs=4)])
    assert found.logprob == pytest.approx(float(expected[found.token]), abs=1e-6)
    assert [token for token, _ in found.top] == torch.topk(expected, 4).indices.tolist()
    assert [p for _, p in found.top] == sorted((p for _, p in found.top), reverse=True)


def test_log_probabilities_only_when_asked() -> None:
    logits = rows(3)
    none, chosen, all_of_them = sample(logits, [draw(), draw(logprobs=0), draw(logprobs=99)])
    assert (none.logprob, none.top) == (None, ())
    assert chosen.logprob is not None
    assert chosen.top == ()
    assert len(all_of_them.top) == 50


def test_uniform_is_in_range_and_spread() -> None:
    numbers = [uniform(seed, index) for seed in range(20) for index in range(50)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 1000
    assert 0.45 < sum(numbers) / 1000 < 0.55
