"""Tools and calls through the front: prompts that have them, answers that make them, places in the list of tools."""

from collections.abc import Callable
from typing import Any

import pytest

from foreword.base.errors import RequestError
from foreword.base.ids import BlockHash
from foreword.cache.explain import Explanation
from foreword.cache.identity import ALONE, Space
from foreword.front.ask import Ask, Conversation, Piece
from foreword.front.bounds import Bounds
from foreword.front.front import Front, Served, read_prompt
from foreword.front.operator import head_ids
from foreword.front.where import Source, Where
from foreword.schedule.admission import limits
from foreword.text.recall import Recall
from foreword.text.tokenizer import Tokenizer
from tests.front.conftest import EOS
from tests.front.played import PlayedEngine
from tests.text.tooling import called, tool

HOTEL = {"role": "system", "content": "You are a clerk."}
HELLO = {"role": "user", "content": "How warm is it?"}
TOOLS = [
    tool("weather", "How warm it is there", city={"type": "string"}),
    tool("clock", "What time it is there", city={"type": "string"}),
    tool("bell", "Calls somebody", whom={"type": "string"}),
]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def front(tooled: Tokenizer, engine: PlayedEngine) -> Front:
    bounds = Bounds(
        limits=limits(num_blocks=200, block_size=4, max_context=700), vocab_size=49152, end_ids=frozenset({EOS})
    )
    served = Served(tokenizer=tooled, space=Space(BlockHash(bytes(32)), 4), bounds=bounds, recall=Recall(tooled))
    return Front(engine, served)


def answered(front: Front, engine: PlayedEngine, text: str, **wishes: Any) -> list[Piece]:
    engine.tokens, engine.finish = front.tokenizer.encode(text), "stop"
    return list(front.submit(Ask(prompt=Conversation([HOTEL, HELLO], TOOLS), **wishes)))


def test_calls_are_told_from_words(front: Front, engine: PlayedEngine) -> None:
    pieces = answered(front, engine, f"I look it up. {ROME}")
    assert "".join(piece.text for piece in pieces).strip() == "I look it up."
    calls = [call for piece in pieces for call in piece.calls]
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Rome"}')]
    assert [token for piece in pieces for token in piece.ids] == engine.tokens


def test_without_tools_an_answer_is_text(front: Front, engine: PlayedEngine) -> None:
    engine.tokens, engine.finish = front.tokenizer.encode(ROME), "stop"
    pieces = list(front.submit(Ask(prompt=Conversation([HOTEL, HELLO]))))
    assert "".join(piece.text for piece in pieces) == ROME
    assert not any(piece.calls for piece in pieces)


def test_a_stop_string_ends_a_call_as_it_ends_words(front: Front, engine: PlayedEngine) -> None:
    pieces = answered(front, engine, ROME, stop=("Rome",))
    assert "".join(piece.text for piece in pieces) == ROME.partition("Rome")[0]
    assert pieces[-1].finish == "stop"
    assert not any(piece.calls for piece in pieces)


def test_an_answer_with_a_call_is_recalled_when_it_comes_back_with_its_result(
    front: Front, engine: PlayedEngine
) -> None:
    """The template writes the call as the model did, so that the ids that were drawn stand there again."""
    tokens = [*front.tokenizer.encode("Ca"), *front.tokenizer.encode("lling. "), *front.tokenizer.encode(ROME)]
    engine.tokens, engine.finish = tokens, "stop"
    first = Conversation([HOTEL, HELLO], TOOLS)
    pieces = list(front.submit(Ask(prompt=first)))
    call = next(call for piece in pieces for call in piece.calls)
    text = "".join(piece.text for piece in pieces)
    turn = {**called(call.name, call.arguments), "content": text}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "18 C"}
    again = Conversation([HOTEL, HELLO, turn, result], TOOLS)
    served = front.served
    read = read_prompt(again, served, ALONE)
    plain = tuple(front.tokenizer.encode(read.text, add_special_tokens=False))
    assert read.num_recalled == len(tokens)
    start = len(read_prompt(first, served, ALONE).ids)
    assert list(read.ids[start : start + len(tokens)]) == tokens
    assert plain[start : start + len(tokens)] != read.ids[start : start + len(tokens)]
    assert front.tokenizer.spell(read.ids) == front.tokenizer.spell(plain)
    other = {**turn, "tool_calls": called("weather", '{"city": "Oslo"}')["tool_calls"]}
    assert read_prompt(Conversation([HOTEL, HELLO, other, result], TOOLS), served, ALONE).num_recalled == 0


def test_the_same_tools_in_another_order_are_another_prompt() -> None:
    turned = dict(reversed(TOOLS[0].items()))
    assert turned == TOOLS[0]
    one, other = (Conversation([HELLO], [first, *TOOLS[1:]]) for first in (TOOLS[0], turned))
    assert one != other
    assert one == Conversation([HELLO], TOOLS)
    assert hash(one) == hash(Conversation([HELLO], TOOLS))
    assert one != Conversation([HELLO])


def where(front: Front, conversation: Conversation, found: Callable[[str], int]) -> Where | None:
    """The place of the token that begins at a character of the rendered text."""
    read = read_prompt(conversation, front.served, ALONE)
    start = found(read.text)
    at = next(n for n in range(len(read.ids)) if len(front.tokenizer.spell(read.ids[: n + 1])) > start)
    return Source(front.tokenizer, conversation, read.ids).where(Explanation("diverged", at))


def test_a_place_in_the_list_of_tools_names_the_tool(front: Front) -> None:
    conversation = Conversation([HOTEL, HELLO], TOOLS)
    for number, one in enumerate(TOOLS):
        place = where(front, conversation, lambda text, one=one: text.index(one["function"]["description"]))
        assert place is not None
        assert (place.message, place.role, place.tool) == (None, None, number)
        assert place.offset is not None
        assert 0 < place.offset < 140
    before = where(front, conversation, lambda text: text.index("a clerk"))
    behind = where(front, conversation, lambda text: text.index("warm is it?"))
    assert before is not None
    assert behind is not None
    assert (before.message, before.tool, before.offset) == (0, None, 7)
    assert (behind.message, behind.tool, behind.offset) == (1, None, 3)


def test_words_of_a_message_are_not_looked_for_among_tools(front: Front) -> None:
    place = where(front, Conversation([{"role": "user", "content": "bell"}], TOOLS), lambda text: text.rindex("bell"))
    assert place is not None
    assert (place.message, place.tool, place.offset) == (0, None, 0)


def test_a_place_in_a_call_names_its_message(front: Front) -> None:
    messages = [HOTEL, HELLO, called("weather", '{"city": "Rome"}'), {**HELLO, "content": "And now?"}]
    place = where(front, Conversation(messages, TOOLS), lambda text: text.index("Rome"))
    assert place is not None
    assert (place.message, place.role, place.offset, place.tool) == (2, "assistant", None, None)
    last = where(front, Conversation(messages, TOOLS), lambda text: text.index("now?"))
    assert last is not None
    assert (last.message, last.role, last.offset) == (3, "user", 3)


def test_a_head_has_its_tools(front: Front) -> None:
    whole = read_prompt(Conversation([HOTEL, HELLO], TOOLS), front.served, ALONE).ids
    head = head_ids(Conversation([HOTEL], TOOLS), front.served)
    assert whole[: len(head)] == head
    assert "bell" in front.tokenizer.spell(head)
    assert "bell" not in front.tokenizer.spell(head_ids(Conversation([HOTEL]), front.served))


def test_tools_that_are_too_long_are_refused_before_they_are_tokenised(front: Front) -> None:
    with pytest.raises(RequestError, match="characters; the context of") as caught:
        front.submit(Ask(prompt=Conversation([HELLO], [tool("f", "x" * 4_000_000)])))
    assert caught.value.field == "messages"
