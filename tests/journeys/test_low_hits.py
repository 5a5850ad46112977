"""Low hit rates that nobody explains: floors that nobody knows of, and bursts that push out what is needed."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword.base.config import CacheConfig, ScheduleConfig
from tests.journeys.conftest import Running, running
from tests.runner import models, plain_models

BLOCK = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is small and plain."""
    config = models.CONFIGS["mistral"]()
    config.tie_word_embeddings = False
    return plain_models.save(models.build(config), tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def quick(tiny: Path) -> Iterator[Running]:
    with running(CacheConfig(kv_cache="2048"), ScheduleConfig(max_context=256), model=str(tiny)) as server:
        yield server


def send(server: Running, ids: list[int]) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache": {"report": True}}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()["cache"]


def words(source: random.Random, count: int) -> list[int]:
    return [source.randrange(100, 500) for _ in range(count)]


def test_every_length_of_a_shared_prefix_hits_to_the_token(quick: Running) -> None:
    """Prefixes of one token to five blocks, then tails that differ: all of the prefix is cached, of a stranger none."""
    source = random.Random(23)
    quick.assembly.keeper.flush()
    for length in range(1, 5 * BLOCK + 1):
        # The first token tells the lengths apart; those from 90 on are the controls'.
        prefix, tail = [5 + length, *words(source, length - 1)], words(source, BLOCK + 4)
        send(quick, [*prefix, 1, *tail])
        again = send(quick, [*prefix, 2, *tail])
        assert (again["cached_tokens"], again["reason"], again["at_token"]) == (length, "diverged", length)
        control = send(quick, [90, 5 + length, *words(source, length + BLOCK + 3)])
        assert control["cached_tokens"] == (0 if length == 1 else 1)  # what controls have in common with each other


def test_what_never_fills_a_block_is_named_by_its_reason(quick: Running) -> None:
    quick.assembly.keeper.flush()
    before = quick.metrics()["foreword_lookups_total{reason=too_short}"]
    short = [7, *range(200, 200 + BLOCK - 2)]
    first, again = send(quick, short), send(quick, short)
    assert [report["cached_tokens"] for report in (first, again)] == [0, 0]
    assert first["reason"] == again["reason"] == "too_short"
    assert quick.metrics()["foreword_lookups_total{reason=too_short}"] == before + 2
    longer = [8, *range(200, 200 + 2 * BLOCK)]
    assert [send(quick, longer)["cached_tokens"] for _ in range(2)] == [0, 2 * BLOCK]


def test_a_burst_of_prompts_that_come_once_leaves_the_hot_one_alone(tiny: Path) -> None:
    """A prompt asked for again and again, then three pools full of prompts that nobody asks for again."""
    source = random.Random(40)
    with running(CacheConfig(kv_cache="32"), ScheduleConfig(max_context=256), model=str(tiny)) as server:
        hot, once = words(source, 7 * BLOCK), words(source, 7 * BLOCK)
        send(server, once)
        hits = [send(server, hot)["cached_tokens"] for _ in range(20)]
        assert hits[1:] == [7 * BLOCK - 1] * 19
        for _ in range(3 * 32 // 8 + 1):
            assert send(server, words(source, 8 * BLOCK))["cached_tokens"] < BLOCK
        assert send(server, hot)["cached_tokens"] == 7 * BLOCK - 1
        last = send(server, once)
        assert (last["cached_tokens"], last["left"] and last["left"]["cause"]) == (0, "pressure")
