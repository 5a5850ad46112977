"""What is refused, and that the error names the field and the limit."""

import math
from typing import Any

import pytest

from foreword.base.errors import RequestError
from foreword.base.params import EVERYTHING, Reach
from foreword.front.ask import Ask
from foreword.front.bounds import check_ids
from foreword.front.front import Front
from tests.front.played import PlayedEngine


@pytest.mark.parametrize(
    ("wish", "field", "message"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ()}, "prompt", "empty"),
        ({"prompt": "word " * 100}, "prompt", "context of 64"),
        ({"prompt": (5,) * 64}, "prompt", "64 tokens.*context of 64"),
        ({"prompt": (5, 49152)}, "prompt", "49152 at position 1.*49151"),
        ({"prompt": (5, -1)}, "prompt", "-1 at position 1"),
        ({"prompt": (5, 2**70)}, "prompt", "position 1"),
        ({"prompt": (5, 1.5)}, "prompt", "1.5 at position 1"),
        ({"prompt": (5, "x")}, "prompt", "'x' at position 1"),
        ({"prompt": "a\ud800"}, "prompt", "surrogate"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -5}, "max_tokens", "at least 1"),
        ({"max_tokens": 64}, "max_tokens", "at most 63"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 10**5000}, "max_tokens", "very large"),
        ({"temperature": math.nan}, "temperature", "between 0 and 2"),
        ({"temperature": math.inf}, "temperature", "between 0 and 2"),
        ({"temperature": -0.1}, "temperature", "between 0 and 2"),
        ({"temperature": 2.01}, "temperature", "between 0 and 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": 10**400}, "temperature", "between 0 and 2"),
        ({"top_p": 0.0}, "top_p", "above 0"),
        ({"top_p": 1.1}, "top_p", "between 0 and 1"),
        ({"top_p": math.nan}, "top_p", "between 0 and 1"),
        ({"top_k": -1}, "top_k", "at least 0"),
        ({"stop": ("a", "b", "c", "d", "e")}, "stop", "at most 4"),
        ({"stop": ("a", "")}, "stop", "empty"),
        ({"stop": "END"}, "stop", "list of strings"),
        ({"stop": (3,)}, "stop", "string"),
        ({"logprobs": -1}, "logprobs", "at least 0"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"prefix_length": -1}, "prefix_length", "at least 0"),
        ({"prefix_length": 2}, "prefix_length", "prompt has 1 token,"),
        ({"seed": 2**63}, "seed", "at most"),
        ({"seed": -(2**63) - 1}, "seed", "at least"),
    ],
)
def test_refused(front: Front, engine: PlayedEngine, wish: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        front.submit(Ask(**{"prompt": "hello", **wish}))
    assert caught.value.field == field
    assert len(str(caught.value)) < 300
    assert engine.submissions == []


@pytest.mark.parametrize(
    "wish",
    [
        {"max_tokens": 63},
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 2.0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prefix_length": 0},
        {"prefix_length": 1},
        {"stop": ("a", "b", "c", "d")},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"prompt": (0,) * 63},
    ],
)
def test_the_limits_themselves_are_accepted(front: Front, wish: dict[str, Any]) -> None:
    front.submit(Ask(**{"prompt": "hello", **wish}))


def test_no_max_tokens_is_what_is_left_of_the_context(front: Front, engine: PlayedEngine) -> None:
    front.submit(Ask(prompt=(5,) * 60))
    assert engine.submissions[0].sampling.max_tokens == 4


def test_a_top_k_of_the_whole_vocabulary_is_none(front: Front, engine: PlayedEngine) -> None:
    front.submit(Ask(prompt="x", top_k=10**9))
    assert engine.submissions[0].sampling.top_k == 0


def test_seeds_are_fresh_unless_given(front: Front, engine: PlayedEngine) -> None:
    for seed in (None, None, 7):
        front.submit(Ask(prompt="x", seed=seed))
    seeds = [submission.sampling.seed for submission in engine.submissions]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7


def test_end_ids_are_those_of_the_model_unless_ignored(front: Front, engine: PlayedEngine) -> None:
    front.submit(Ask(prompt="x"))
    front.submit(Ask(prompt="x", ignore_eos=True))
    assert [submission.sampling.stop_ids for submission in engine.submissions] == [frozenset({2}), frozenset()]


def test_prefix_length_bounds_reads_and_stores(front: Front, engine: PlayedEngine) -> None:
    front.submit(Ask(prompt="x y z"))
    front.submit(Ask(prompt="x y z", prefix_length=2))
    reaches = [submission.reach for submission in engine.submissions]
    assert reaches == [EVERYTHING, Reach(read_tokens=2, store_tokens=2)]


def test_a_long_list_of_ids_is_checked_fast() -> None:
    check_ids(tuple(range(49152)) * 3, 49152)
