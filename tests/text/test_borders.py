"""Cuts that change no id, and tokenizers that have none."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from foreword.text.borders import Borders
from foreword.text.tokenizer import Tokenizer
from tests.text.samples import texts

NAMES = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<s>", "</s>", "[SEP]")
marked = st.lists(st.one_of(st.sampled_from(NAMES), texts, st.sampled_from((" ", "\n", "\n\n", "a", "1")))).map("".join)
"""Texts with special tokens in them, next to anything."""


@pytest.fixture(params=["embedded", "llama_style", "wordpiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue("tokenizer" if request.param == "embedded" else request.param)


@pytest.mark.parametrize("special", [True, False])
def test_parts_have_the_ids_of_the_whole(any_tokenizer: Tokenizer, special: bool) -> None:
    borders = any_tokenizer.borders
    assert borders is not None

    @given(text=marked)
    def check(text: str) -> None:
        parts = borders.cut(text)
        assert "".join(parts) == text
        assert all(borders.is_at(part) for part in parts[1:])
        ids = [token for part in parts for token in any_tokenizer.encode(part, add_special_tokens=False)]
        around = (borders.before, borders.after) if special else ((), ())
        assert [*around[0], *ids, *around[1]] == any_tokenizer.encode(text, add_special_tokens=special)

    check()


def test_every_special_token_begins_a_part(tokenizer: Tokenizer) -> None:
    assert tokenizer.borders is not None
    cut = tokenizer.borders.cut
    assert cut("") == [""]
    assert cut("no token <|im_here") == ["no token <|im_here"]
    assert cut("a<|im_start|>b<|im_end|><|im_end|>") == ["a", "<|im_start|>b", "<|im_end|>", "<|im_end|>"]
    assert cut("<<|<|im_<|im_start|>") == ["<<|<|im_", "<|im_start|>"]


def test_the_longest_token_wins_and_nothing_before_it_hides_it() -> None:
    borders = Borders(["[[[x", "[[[xy", "z"])
    assert borders.cut("[[[[xy[[[xz[[[") == ["[", "[[[xy", "[[[x", "z[[["]


@pytest.mark.parametrize(
    ("added", "has"),
    [
        ([AddedToken("<a>", special=True)], True),
        ([AddedToken("<a>", special=True, rstrip=True)], True),
        ([AddedToken("<a>", special=True), AddedToken("\n\n", normalized=False)], True),
        ([AddedToken("<a>", special=False, normalized=False)], False),
        ([AddedToken("<a>", special=True, normalized=True)], False),
        ([AddedToken("<a>", special=True, lstrip=True)], False),
        ([AddedToken("<a>", special=True), AddedToken("b", single_word=True, normalized=False)], False),
        ([AddedToken("<a>", special=True), AddedToken("<a>b", normalized=False)], False),
        ([AddedToken("<a>", special=True), AddedToken("x<", normalized=False)], False),
        ([AddedToken("<a>", special=True), AddedToken("x<a>y", normalized=False)], False),
        ([], False),
    ],
)
def test_only_tokens_that_part_a_text_for_sure_are_borders(tmp_path: Path, added: list[Any], has: bool) -> None:
    made = Backend(models.BPE(vocab={name: i for i, name in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(added)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    assert (Tokenizer(tmp_path).borders is not None) == has
