"""An answer that comes back: whole, cut off, from the one who got it, from somebody else."""

from collections.abc import Sequence

import pytest

from foreword.cache.identity import Tenant
from foreword.front.ask import Ask, Caller, Conversation
from foreword.front.front import Front
from foreword.text.tokenizer import Tokenizer
from tests.front.conftest import EOS
from tests.front.played import PlayedEngine

QUESTION = {"role": "user", "content": "Hi"}
RED, BLUE = (Caller(tenant=Tenant.named(name)) for name in ("red", "blue"))


@pytest.fixture
def drawn(tokenizer: Tokenizer) -> list[int]:
    """`One two`, a letter each."""
    return [token for letter in "One two" for token in tokenizer.encode(letter)]


def echoed(front: Front, engine: PlayedEngine, said: str, caller: Caller = RED) -> tuple[list[int], int]:
    """The ids of the next turn after `said`, and how many were recalled."""
    messages = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
    front.submit(Ask(prompt=Conversation(messages), max_tokens=1), caller).cancel()
    submission = engine.submissions[-1]
    return list(submission.chain.tokens), submission.recalled_tokens


def holds(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[i : i + len(part)]) == list(part) for i in range(len(ids)))


def test_the_next_turn_has_the_drawn_ids(front: Front, engine: PlayedEngine, drawn: list[int]) -> None:
    engine.tokens, engine.finish = [*drawn, EOS], "stop"
    before, none = echoed(front, engine, "One two")
    text = "".join(piece.text for piece in front.submit(Ask(prompt=Conversation([QUESTION])), RED))
    asked = list(engine.submissions[-1].chain.tokens)
    ids, recalled = echoed(front, engine, text)
    assert (none, recalled) == (0, len(drawn))
    assert not holds(before, drawn)
    assert ids[: len(asked) + len(drawn)] == [*asked, *drawn]
    assert front.tokenizer.spell(ids) == front.tokenizer.spell(before)


def test_a_stranger_gets_the_ids_of_the_text(front: Front, engine: PlayedEngine, drawn: list[int]) -> None:
    engine.tokens = drawn
    list(front.submit(Ask(prompt=Conversation([QUESTION])), RED))
    ids, recalled = echoed(front, engine, "One two", BLUE)
    assert (holds(ids, drawn), recalled) == (False, 0)
    assert echoed(front, engine, "One two", RED)[1] == len(drawn)


async def test_a_caller_who_leaves_may_send_back_what_came(
    front: Front, engine: PlayedEngine, drawn: list[int]
) -> None:
    engine.tokens, engine.ends = drawn, False
    for way in ("for", "async for"):
        said = ""
        answer = front.submit(Ask(prompt=Conversation([QUESTION])), RED)
        if way == "for":
            pieces = iter(answer)
            while len(said) < 4:
                said += next(pieces).text
            pieces.close()  # pyright: ignore[reportAttributeAccessIssue]
        else:
            stream = aiter(answer)
            while len(said) < 5:
                said += (await anext(stream)).text
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        ids, recalled = echoed(front, engine, said)
        assert recalled == len(said) < len(drawn)
        assert holds(ids, drawn[:recalled])


def test_the_answer_is_there_when_its_last_piece_is(front: Front, engine: PlayedEngine, drawn: list[int]) -> None:
    engine.tokens = drawn
    for piece in front.submit(Ask(prompt=Conversation([QUESTION])), RED):
        if piece.finish is not None:
            assert echoed(front, engine, "One two")[1] == len(drawn)


def test_a_stop_string(front: Front, engine: PlayedEngine, drawn: list[int]) -> None:
    engine.tokens = drawn
    said = "".join(piece.text for piece in front.submit(Ask(prompt=Conversation([QUESTION]), stop=("two",)), RED))
    assert (said, echoed(front, engine, said)[1]) == ("One ", 4)


def test_raw_prompts_with_special_tokens(front: Front, engine: PlayedEngine, drawn: list[int]) -> None:
    engine.tokens = drawn
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    list(front.submit(Ask(prompt=asked), RED))
    front.submit(Ask(prompt=f"{asked}One two<|im_end|>\n"), RED)
    assert engine.submissions[-1].recalled_tokens == len(drawn)
    front.submit(Ask(prompt=f"{asked}One two"), RED)
    assert engine.submissions[-1].recalled_tokens == len(drawn)
    front.submit(Ask(prompt=f"{asked}One two three"), RED)
    assert engine.submissions[-1].recalled_tokens == 0


def test_what_is_not_to_be_stored_is_not_remembered(front: Front, engine: PlayedEngine, drawn: list[int]) -> None:
    engine.tokens = drawn
    for store in (False, True):
        list(front.submit(Ask(prompt=Conversation([QUESTION]), store=store), RED))
        assert echoed(front, engine, "One two")[1] == len(drawn) * store


def test_a_prompt_of_ids_is_taken_as_it_is(front: Front, engine: PlayedEngine, drawn: list[int]) -> None:
    engine.tokens = drawn
    asked = front.render_chat([QUESTION])
    list(front.submit(Ask(prompt=asked), RED))
    assert echoed(front, engine, "One two")[1] == 0
