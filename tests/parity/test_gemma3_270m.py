"""A real model with sliding windows, the Gemma 3 270M base model: past its window a hit changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foreword import LLM
from foreword.runner import library
from tests.runner.models import own_answer

# The first test converts the model if nobody has before, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)

WINDOW = 512
COUNT = 12
NAMES = ("Ingrid", "Old Per", "the doctor", "a man from the mainland", "nobody", "the bishop's sister")
THINGS = ("two lamps", "a barrel of oil", "news of the storm", "seven letters", "a goat", "the wrong newspaper")
DIARY = "The diary of the lighthouse keeper.\n" + "".join(
    f"Day {i}. At {6 + i * 5 % 12} o'clock {NAMES[i * 7 % 6]} came by boat and brought {THINGS[i * 5 % 6]}; the wind"
    f" was {('north', 'west', 'south-west')[i % 3]} and I counted {i * i % 23 + 2} ships.\n"
    for i in range(1, 17)
)
ENDS = ("Day 17. At", "The ship that came")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("gemma3-270m", device="cpu", dtype="float32", kv_cache="60", max_context=1024) as made:
        yield made


@pytest.fixture(scope="module")
def model(llm: LLM) -> Any:
    """The same weights in the library's own hands."""
    own = library.load_weights(llm.assembly.card.directory, torch.float32, attention=None)
    return own.eval().requires_grad_(False)


def prompt(llm: LLM, end: str) -> list[int]:
    return llm.assembly.front.tokenizer.encode(DIARY + end)


def test_it_is_what_it_says(llm: LLM) -> None:
    card = llm.assembly.card
    assert (card.name, card.vocab_size, card.max_context, card.end_ids) == ("gemma3-270m", 262144, 32768, {1})
    assert card.num_parameters == 268_098_176
    assert card.not_cacheable is None
    assert card.exact
    [result] = llm.generate("The capital of France is", max_tokens=4)
    assert result.prompt_tokens == 6, "with the mark that begins a text"
    assert result.text.startswith(" the")
    [result] = llm.generate("Monday, Tuesday, Wednesday, Thursday,", max_tokens=4)
    assert result.text == " Friday, Saturday,"


def test_past_the_window_a_hit_answers_as_generate_does(llm: LLM, model: Any) -> None:
    tokens = prompt(llm, ENDS[0])
    assert len(tokens) > WINDOW + 64
    theirs = own_answer(model, tokens, COUNT)
    llm.assembly.worker.flush()
    [cold] = llm.generate(tokens, max_tokens=COUNT, logprobs=1)
    [warm] = llm.generate(tokens, max_tokens=COUNT, logprobs=1)
    assert list(cold.token_ids) == theirs
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == len(tokens) - 1
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_another_question_over_the_same_text(llm: LLM, model: Any) -> None:
    llm.generate(prompt(llm, ENDS[0]), max_tokens=1)
    tokens = prompt(llm, ENDS[1])
    [result] = llm.generate(tokens, max_tokens=COUNT)
    assert result.cached_tokens > WINDOW
    assert list(result.token_ids) == own_answer(model, tokens, COUNT)


def test_after_blocks_of_it_were_evicted(llm: LLM) -> None:
    """The pool holds one such text and a half: a second one takes from the first."""
    tokens, cache = prompt(llm, ENDS[0]), llm.assembly.worker._engine.scheduler.cache
    [before] = llm.generate(tokens, max_tokens=COUNT, logprobs=1)
    evicted = cache.num_evicted
    llm.generate(llm.assembly.front.tokenizer.encode("Quite another text. " + DIARY), max_tokens=1)
    assert cache.num_evicted > evicted
    [after] = llm.generate(tokens, max_tokens=COUNT, logprobs=1)
    assert 0 < after.cached_tokens < WINDOW
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
