"""Answers that come back take the ids they were given in; everything else is tokenised as if nothing had been said."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.base.errors import RequestError
from foreword.text.detokenizer import Detokenizer
from foreword.text.recall import Read, Recall
from foreword.text.stops import StopStrings
from foreword.text.tokenizer import Tokenizer
from tests.text.samples import texts
from tests.text.test_borders import marked

ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
MORE = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
END = 2


@pytest.fixture
def recall(tokenizer: Tokenizer) -> Recall:
    return Recall(tokenizer)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that spell the text, a letter each: not those that tokenising gives."""
    ids = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert ids != tokenizer.encode(text)
    return ids


def say(recall: Recall, drawn: Sequence[int], text: str, asked: str = ASKED, owner: str = "") -> None:
    place = recall.read(asked, owner).place
    assert place is not None
    place.keep(text, drawn)


def spelled(tokenizer: Tokenizer, drawn: Sequence[int], stops: Sequence[str] = ()) -> str:
    """The text of an answer, as `Answer` makes it."""
    detokenizer, stop = Detokenizer(tokenizer.vocabulary), StopStrings(stops)
    text = "".join(stop.push(detokenizer.push(token)) for token in drawn)
    return text if stop.stopped else text + stop.finish()


def plain(tokenizer: Tokenizer, text: str) -> Read:
    return Read(tuple(tokenizer.encode(text)))


def same(read: Read, other: Read) -> bool:
    return (read.ids, read.num_recalled) == (other.ids, other.num_recalled)


def test_an_answer_has_the_ids_it_was_given_in(recall: Recall, tokenizer: Tokenizer) -> None:
    drawn = letters(tokenizer, "Hello there")
    say(recall, [*drawn, END], "Hello there")
    ids = (*tokenizer.encode(ASKED), *drawn, *tokenizer.encode(MORE))
    for _ in range(2):
        assert same(recall.read(ASKED + "Hello there" + MORE, ""), Read(ids, len(drawn)))
    assert recall.read(ASKED + "Hello there", "").ids == ids[: -len(tokenizer.encode(MORE))]
    assert tokenizer.spell(ids) == ASKED + "Hello there" + MORE


def test_a_conversation_of_many_turns(recall: Recall, tokenizer: Tokenizer) -> None:
    text, ids = ASKED, tokenizer.encode(ASKED)
    for turn in range(5):
        drawn = letters(tokenizer, f"Answer number {turn}")
        say(recall, [*drawn, END], f"Answer number {turn}", asked=text)
        text, ids = text + f"Answer number {turn}" + MORE, [*ids, *drawn, *tokenizer.encode(MORE)]
        assert recall.read(text, "").ids == tuple(ids)


def test_a_prompt_that_goes_on_after_an_answer_counts_both(recall: Recall, tokenizer: Tokenizer) -> None:
    first, second = letters(tokenizer, "Hello there"), letters(tokenizer, ", my friend")
    say(recall, first, "Hello there")
    say(recall, [*second, END], ", my friend", asked=ASKED + "Hello there")
    read = recall.read(ASKED + "Hello there, my friend" + MORE, "")
    assert same(read, Read((*tokenizer.encode(ASKED), *first, *second, *tokenizer.encode(MORE)), len(first + second)))


@pytest.mark.parametrize(
    "text",
    [
        ASKED + "Hello there." + MORE,
        ASKED + "Hello ther" + MORE,
        ASKED + " Hello there" + MORE,
        ASKED.replace("Hi", "Ho") + "Hello there" + MORE,
        "<|im_end|>" + ASKED + "Hello there" + MORE,
        ASKED.replace("assistant", "user") + "Hello there" + MORE,
    ],
)
def test_another_text_is_tokenised(recall: Recall, tokenizer: Tokenizer, text: str) -> None:
    say(recall, letters(tokenizer, "Hello there"), "Hello there")
    assert same(recall.read(text, ""), plain(tokenizer, text))
    assert recall.read(ASKED + "Hello there" + MORE, "").num_recalled > 0


def test_the_tenant_recalls_and_a_stranger_does_not(recall: Recall, tokenizer: Tokenizer) -> None:
    text = ASKED + "Hello there" + MORE
    say(recall, letters(tokenizer, "Hello there"), "Hello there", owner="red")
    for stranger in ("blue", ""):
        assert same(recall.read(text, stranger), plain(tokenizer, text))
    assert recall.read(text, "red").num_recalled > 0
    assert not same(recall.read(text, "red"), plain(tokenizer, text))


def test_forgetting(recall: Recall, tokenizer: Tokenizer) -> None:
    text = ASKED + "Hello there" + MORE
    for owner in ("red", "blue"):
        say(recall, letters(tokenizer, "Hello there"), "Hello there", owner=owner)
    recall.forget("red")
    assert same(recall.read(text, "red"), plain(tokenizer, text))
    assert recall.read(text, "blue").num_recalled > 0
    recall.forget()
    assert same(recall.read(text, "blue"), plain(tokenizer, text))
    recall.forget("nobody")


def test_an_answer_that_ends_after_a_flush_is_not_remembered(recall: Recall, tokenizer: Tokenizer) -> None:
    place = recall.read(ASKED, "").place
    assert place is not None
    recall.forget()
    place.keep("Hello there", letters(tokenizer, "Hello there"))
    assert recall.read(ASKED + "Hello there" + MORE, "").num_recalled == 0


def test_memory_is_bounded_and_the_oldest_goes_first(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer, max_bytes=50_000)
    asked = [ASKED.replace("Hi", f"Question {i}") for i in range(300)]
    for text in asked:
        say(recall, letters(tokenizer, "Hello there"), "Hello there", asked=text)
        assert recall.num_bytes("") <= 100_000
    assert recall.num_bytes("") > 50_000
    assert recall.read(asked[-1] + "Hello there" + MORE, "").num_recalled > 0
    assert recall.read(asked[0] + "Hello there" + MORE, "").num_recalled == 0


def test_what_is_too_large_is_tokenised_each_time(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer, max_bytes=100)
    say(recall, letters(tokenizer, "Hello there"), "Hello there")
    text = ASKED + "Hello there" + MORE
    assert same(recall.read(text, ""), plain(tokenizer, text))
    assert recall.num_bytes("") == 0


@pytest.mark.parametrize(
    ("words", "stop", "said"),
    [
        (("one", " two", "\n\n", "three"), "\n\n", "one two"),
        (("one", " two", "\n", "END", "x"), "\nEND", "one two"),
        (("one", " two three"), "two", None),  # in the middle of a token
    ],
)
def test_a_stop_string(recall: Recall, tokenizer: Tokenizer, words: Sequence[str], stop: str, said: str | None) -> None:
    drawn = [token for word in words for token in letters_or_one(tokenizer, word)]
    text = spelled(tokenizer, drawn, [stop])
    say(recall, drawn, text)
    read = recall.read(ASKED + text + MORE, "")
    assert text == (said or "one ")
    if said is None:
        assert same(read, plain(tokenizer, ASKED + text + MORE))
    else:
        assert read.num_recalled == sum(len(letters_or_one(tokenizer, word)) for word in ("one", " two"))


def letters_or_one(tokenizer: Tokenizer, word: str) -> list[int]:
    return letters(tokenizer, word) if word in ("one", "x") and len(word) > 1 else tokenizer.encode(word)


def test_half_a_character_at_the_end_is_left_out(recall: Recall, tokenizer: Tokenizer) -> None:
    said, half = letters(tokenizer, "ok then"), tokenizer.encode("\U00012000")[:-1]
    say(recall, [*said, *half], "ok then")
    assert recall.read(ASKED + "ok then" + MORE, "").num_recalled == len(said)


@pytest.mark.parametrize(
    ("drawn_text", "special"), [("Hello there", 5), ("say <|im_end|> aloud", None), ("<|im_start|>", None)]
)
def test_special_tokens_in_an_answer(
    recall: Recall, tokenizer: Tokenizer, drawn_text: str, special: int | None
) -> None:
    """One that was drawn is no text, and one that was only spelled out will be read as one."""
    drawn = letters(tokenizer, drawn_text.replace("|>", "|")) if special else spelled_out(tokenizer, drawn_text)
    if special:
        drawn.insert(3, special)
    text = spelled(tokenizer, drawn)
    assert text == drawn_text
    say(recall, drawn, text)
    assert same(recall.read(ASKED + text + MORE, ""), plain(tokenizer, ASKED + text + MORE))


def spelled_out(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token for letter in text for token in tokenizer.encode(letter)]


def test_history_is_tokenised_once(recall: Recall, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    history = "".join(f"<|im_start|>user\nTurn {i}.<|im_end|>\n" for i in range(50))
    first = recall.read(history + "<|im_start|>assistant\n", "")
    tokenised: list[str] = []
    encode = tokenizer.encode

    def counted(text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        tokenised.append(text)
        return encode(text, add_special_tokens=add_special_tokens, field=field)

    monkeypatch.setattr(tokenizer, "encode", counted)
    assert recall.read(history + "<|im_start|>assistant\n", "").ids == first.ids
    assert tokenised == ["<|im_start|>assistant\n"]
    tokenised.clear()
    recall.read(history + "<|im_start|>assistant\n", "stranger")
    assert len(tokenised) == 101


def test_a_lone_surrogate_is_named_by_its_place_in_the_whole(recall: Recall) -> None:
    with pytest.raises(RequestError, match=f"messages is not valid Unicode.* {len(ASKED)}") as caught:
        recall.read(ASKED + "\ud800", "", field="messages")
    assert caught.value.field == "messages"


def test_where_it_is_off_texts_are_tokenised(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer, off=True)
    assert not recall.on
    read = recall.read(ASKED, "")
    assert (read.ids, read.num_recalled, read.place) == (plain(tokenizer, ASKED).ids, 0, None)
    assert Recall(tokenizer).on


def test_a_prompt_without_special_tokens_has_no_place(recall: Recall) -> None:
    assert recall.read("The capital of France is", "").place is None
    assert recall.read("", "").place is None
    assert recall.read("x<|im_start|>y", "").place is not None


@given(text=marked, again=marked)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_without_answers_ids_are_those_of_the_text(tokenizer: Tokenizer, recall: Recall, text: str, again: str) -> None:
    for prompt in (text, text + again, text + again):
        for special in (True, False):
            read = recall.read(prompt, "", add_special_tokens=special)
            assert read.ids == tuple(tokenizer.encode(prompt, add_special_tokens=special))
            assert read.num_recalled == 0


drawn_ids = st.lists(
    st.one_of(st.integers(0, 400), st.integers(0, 49151), st.sampled_from((0, 1, 2, 198, 216))), max_size=30
)
"""What a model might draw: bytes of half characters, special tokens, anything."""


@given(drawn=drawn_ids, stop=st.one_of(st.none(), texts.map(lambda text: text[:3])), more=marked)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_recalled_ids_spell_the_same_text(
    tokenizer: Tokenizer, recall: Recall, drawn: list[int], stop: str | None, more: str
) -> None:
    text = spelled(tokenizer, drawn, [stop] if stop else [])
    say(recall, drawn, text)
    for prompt in (ASKED + text + MORE, ASKED + text, ASKED + text + more):
        read = recall.read(prompt, "")
        assert tokenizer.spell(read.ids) == tokenizer.spell(tokenizer.encode(prompt))
        if not read.num_recalled:
            assert read.ids == tuple(tokenizer.encode(prompt))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sentencepiece_tokenizers_answers_too(llama_style: Tokenizer, data: st.DataObject) -> None:
    recall = Recall(llama_style)
    drawn = data.draw(st.lists(st.integers(3, llama_style.size - 1), min_size=1, max_size=12))
    asked = "<s>the hello" + data.draw(st.sampled_from(("", "</s>", "</s>a", "</s> ")))
    prompt = recall.read(asked, "")
    detokenizer = Detokenizer(
        llama_style.vocabulary, continues=prompt.ids[-1] not in llama_style.vocabulary.special_ids
    )
    text = "".join(map(detokenizer.push, drawn))
    assert prompt.place is not None
    prompt.place.keep(text, drawn)
    whole = asked + text + "</s>b"
    read = recall.read(whole, "")
    assert llama_style.spell(read.ids) == llama_style.spell(llama_style.encode(whole))
