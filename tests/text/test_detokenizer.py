"""Ids to text piece by piece: joined it is the whole, and no piece is half a character."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from foreword.text.detokenizer import Detokenizer
from foreword.text.tokenizer import Tokenizer
from tests.text.samples import texts


def pieces(tokenizer: Tokenizer, ids: Iterable[int], *, continues: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer.vocabulary, continues=continues)
    return [detokenizer.push(token) for token in ids]


def is_whole(text: str, decoded: str) -> bool:
    """Whether it is all that the tokenizer's own decode gives, or all but the open character at the end."""
    return decoded in (text, text + "\ufffd")


@given(text=texts)
def test_text_comes_back_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    got = pieces(tokenizer, ids)
    whole = tokenizer.decode(ids)  # not always the text: this model's vocabulary lacks some bytes
    assert is_whole("".join(got), whole)
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in got)


@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=40))
def test_any_ids_give_what_the_tokenizer_gives(tokenizer: Tokenizer, ids: list[int]) -> None:
    # Random ids cut characters anywhere and hold special tokens; the tokenizer's own decode is the judge.
    assert is_whole("".join(pieces(tokenizer, ids)), tokenizer.decode(ids))


def test_every_token_alone_and_after_another(tokenizer: Tokenizer) -> None:
    for token in range(tokenizer.size):
        assert is_whole("".join(pieces(tokenizer, [token])), tokenizer.decode([token]))


def test_a_character_over_several_tokens_comes_with_its_last_one(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U00012000")
    assert len(ids) > 1
    got = pieces(tokenizer, ids)
    assert got == [""] * (len(ids) - 1) + ["\U00012000"]


def test_an_open_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok\U00012000")[:-1]
    assert "".join(pieces(tokenizer, ids)) == "ok"
    assert tokenizer.decode(ids) == "ok\ufffd"


def test_special_and_unknown_ids_are_no_text(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [0, 1, 2, 10**6]) == [""] * 4


@given(text=st.text(alphabet=" athehelloworld.,你好x😀\nα", max_size=30))
def test_sentencepiece_text_comes_back_whole(llama_style: Tokenizer, text: str) -> None:
    ids = llama_style.encode(text, add_special_tokens=False)
    assert "".join(pieces(llama_style, ids)) == llama_style.decode(ids)


@given(ids=st.lists(st.one_of(st.integers(259, 274), st.integers(3, 130), st.integers(0, 2)), max_size=20))
def test_any_sentencepiece_ids_of_valid_bytes(llama_style: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(llama_style, ids)) == llama_style.decode(ids)


def test_sentencepiece_drops_the_first_space_only_where_a_text_begins(llama_style: Tokenizer) -> None:
    ids = llama_style.encode("hello world", add_special_tokens=False)
    assert "".join(pieces(llama_style, ids)) == "hello world"
    assert "".join(pieces(llama_style, ids, continues=True)) == " hello world"
    space = 3 + ord(" ")  # the same as a byte
    assert pieces(llama_style, [space, space]) == ["", " "]
    assert pieces(llama_style, [space, space], continues=True) == [" ", " "]
    assert "".join(pieces(llama_style, [1, *ids])) == "hello world"  # a special token is no text in front


def test_sentencepiece_bytes_that_are_no_character_do_not_spoil_their_neighbours(llama_style: Tokenizer) -> None:
    good = [3 + byte for byte in "é".encode()]
    assert "".join(pieces(llama_style, [*good, 3 + 0xFF, *good])) == "é\ufffdé"


@given(ids=st.lists(st.integers(0, 8), max_size=12))
def test_wordpiece_puts_spaces_as_the_tokenizer_does(wordpiece: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(wordpiece, ids)) == wordpiece.decode(ids)
