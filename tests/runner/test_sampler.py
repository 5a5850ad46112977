import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from foreword.base.params import Sampling
from foreword.runner import sampler
from foreword.runner.sampler import uniform
from foreword.schedule.plan import Draw, Sample


def draw(number: int = 0, **settings: Any) -> Draw:
    return Draw(Sampling(max_tokens=1, **settings), number)


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[Sample]:
    return sampler.draw(logits, draws).samples()


def rows(count: int, width: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_zero_takes_the_best_of_each_row() -> None:
    logits = rows(4)
    assert [s.token for s in sample(logits, [draw()] * 4)] == logits.argmax(-1).tolist()


def test_no_rows() -> None:
    assert sample(rows(0), []) == []


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


@pytest.mark.parametrize("limit", [{}, {"top_k": 5}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300])
def test_next_to_no_temperature_is_none_at_all(temperature: float, limit: dict[str, float]) -> None:
    logits = 10 * rows(4)
    draws = [draw(i, temperature=temperature, **limit) for i in range(4)]
    assert [s.token for s in sample(logits, draws)] == logits.argmax(-1).tolist()


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


def mass_alone(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What one row's tokens add up to, best first where an order is needed, cut where it is enough; and which."""
    scaled = (logits.double() - float(logits.max())) / sampling.temperature
    tokens: torch.Tensor | None = None
    if 0 < sampling.top_k < scaled.shape[0]:
        scaled, tokens = torch.topk(scaled, sampling.top_k)
    elif sampling.top_p < 1:
        scaled, tokens = torch.sort(scaled, descending=True, stable=True)
    mass = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    if sampling.top_p < 1:
        mass = mass[: int((mass < sampling.top_p).sum()) + 1]
    return mass, tokens


def sample_alone(logits: torch.Tensor, one: Draw, chance: Callable[[int, int], float] = uniform) -> Sample:
    """The formula, for one row by itself."""
    sampling, token = one.sampling, int(logits.argmax())
    if sampling.temperature > 0:
        mass, tokens = mass_alone(logits, sampling)
        mark = chance(sampling.seed, one.number) * mass[-1]
        place = min(int(torch.searchsorted(mass, mark, right=True)), mass.shape[0] - 1)
        token = place if tokens is None else int(tokens[place])
    if sampling.logprobs is None:
        return Sample(token)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(logprobs, min(sampling.logprobs, logprobs.shape[0]))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Sample(token, float(logprobs[token]), top)


def some_draws(source: random.Random, count: int) -> list[Draw]:
    return [
        draw(
            number=source.randrange(50),
            temperature=source.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.5]),
            top_k=source.choice([0, 0, 1, 5, 40, 5000]),
            top_p=source.choice([1.0, 1.0, 0.999, 0.9, 0.3]),
            seed=source.randrange(1000),
            logprobs=source.choice([None, None, 0, 1, 5]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "few finite"])
@pytest.mark.parametrize("width", [1, 7, 50, 1000, 4099])
def test_rows_together_are_rows_alone_to_the_bit(width: int, kind: str) -> None:
    source = random.Random(f"{width}/{kind}")
    for seed in range(12):
        count = source.choice([1, 2, 3, 8, 33])
        logits = rows(count, width, seed)
        if kind == "bfloat16":
            logits = logits.bfloat16()  # many are equal
        if kind == "few finite":
            logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.9] = -math.inf
            logits[:, 0] = 0.5
        draws = some_draws(source, count)
        together = sample(logits, draws)
        assert together == [sample_alone(row, one) for row, one in zip(logits, draws, strict=True)]
        order = source.sample(range(count), count)[: source.randint(1, count)]
        assert sample(logits[order], [draws[i] for i in order]) == [together[i] for i in order]


def _chosen(chances: dict[tuple[int, int], float], seed: int, index: int) -> float:
    return chances[seed, index]


@pytest.mark.parametrize("width", [50, 4099])
def test_on_the_border_of_two_tokens_rows_together_are_rows_alone(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The uniform number is where one token's share ends and the next one's begins: a bit decides."""
    source, flipped = random.Random(width), 0
    for seed in range(12):
        logits = rows(8, width, seed)
        draws = [one._replace(number=i) for i, one in enumerate(some_draws(source, 8))]
        borders = dict[tuple[int, int], float]()
        for row, one in zip(logits, draws, strict=True):
            if one.sampling.temperature > 0:
                mass, _ = mass_alone(row, one.sampling)
                borders[one.sampling.seed, one.number] = float(mass[source.randrange(mass.shape[0])] / mass[-1])
        before: list[Sample] = []
        for shift in (-1e-15, 0.0, 1e-15):
            chance = partial(_chosen, {key: border + shift for key, border in borders.items()})
            monkeypatch.setattr(sampler, "uniform", chance)
            together = sample(logits, draws)
            assert together == [sample_alone(row, one, chance) for row, one in zip(logits, draws, strict=True)]
            flipped += shift >= 0 and together != before
            before = together
    assert flipped, "it is the border"


def test_tokens_drawn_stay_on_the_device_for_the_next_step() -> None:
    logits = rows(5)
    draws = some_draws(random.Random(3), 5)
    drawn = sampler.draw(logits, draws)
    assert drawn.tokens.tolist() == [one.token for one in drawn.samples()]
    assert drawn.samples() == sample(logits, draws)
