"""Kinds of wrong reuse that users of other engines met in a library: inputs that no key holds, flips after a hit."""

from typing import Any

import pytest

from benchmarks.flips import measure
from foreword import LLM
from foreword.base.errors import RequestError

UNKEYED = ("inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "past_key_values", "prompt_embeds")
"""What shapes keys and values and is no token id."""


@pytest.mark.parametrize("name", UNKEYED)
def test_wrong_reuse_what_no_key_holds_is_refused(llm: LLM, name: str) -> None:
    prompt = "The same ids with something else beside them."
    assert llm.generate(prompt, max_tokens=1)[0].finish_reason == "length"
    other: dict[str, Any] = {name: [[0.0] * 8]}
    with pytest.raises(RequestError, match=name):
        llm.generate(prompt, max_tokens=1, **other)  # never a hit on what was computed without it


@pytest.mark.parametrize("rows", [[[0.5, 0.25]], [[[0.5], [0.25]]]])
def test_wrong_reuse_vectors_are_no_prompt(llm: LLM, rows: Any) -> None:
    with pytest.raises((RequestError, TypeError)):
        llm.generate(rows, max_tokens=1)


def test_numerics_cold_warm_half_warm_and_without_cache_agree_in_every_bit() -> None:
    """`benchmarks/flips.py` for a few prompts; it takes a thousand."""
    arms = measure(12, max_tokens=4)
    assert {name: (arm.flips, arm.gap) for name, arm in arms.items()} == dict.fromkeys(arms, (0, 0.0))
    assert (arms["warm"].hits, arms["partial"].hits, arms["cold"].hits) == (12, 12, 0)
