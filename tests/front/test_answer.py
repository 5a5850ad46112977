"""Tokens to pieces: text, stop strings, ends, accounts, and what happens when nobody listens any more."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.front.ask import Ask, Piece
from foreword.front.front import Front
from foreword.schedule.plan import Sample
from foreword.text.tokenizer import Tokenizer
from tests.front.conftest import EOS
from tests.front.played import PlayedEngine
from tests.text.samples import texts


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


def check_form(pieces: Sequence[Piece]) -> None:
    assert all(piece.finish is None for piece in pieces[:-1])
    assert pieces[-1].finish is not None
    assert pieces[-1].usage is not None


def test_the_text_is_the_tokens(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens = tokenizer.encode("Hello 你好 😀 world")
    pieces = list(front.submit(Ask(prompt="x")))
    check_form(pieces)
    assert joined(pieces) == "Hello 你好 😀 world"
    assert ids_of(pieces) == list(engine.tokens)
    assert pieces[-1].finish == "length"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == len(engine.tokens)
    assert engine.cancelled == []


def test_usage_comes_with_the_first_piece_and_the_last(
    front: Front, engine: PlayedEngine, tokenizer: Tokenizer
) -> None:
    engine.tokens = tokenizer.encode("one two three four")
    pieces = list(front.submit(Ask(prompt="x")))
    assert [piece.usage is not None for piece in pieces] == [True, False, False, True]


def test_an_end_id_ends_the_text_and_is_counted(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens, engine.finish = [*tokenizer.encode("Paris."), EOS], "stop"
    pieces = list(front.submit(Ask(prompt="x")))
    assert (joined(pieces), pieces[-1].finish) == ("Paris.", "stop")
    assert ids_of(pieces) == list(engine.tokens)


def test_a_stop_string_ends_the_answer(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens = tokenizer.encode("first line\n\nsecond line and more")
    answer = front.submit(Ask(prompt="x", stop=("\n\n", "zzz")))
    pieces = list(answer)
    check_form(pieces)
    assert (joined(pieces), pieces[-1].finish) == ("first line", "stop")
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == len(ids_of(pieces)) < len(engine.tokens)
    assert (engine.cancelled, engine.finishes) == ([answer.id], ["stop"])


def test_the_engines_end_after_our_own_stop_is_not_seen(
    front: Front, engine: PlayedEngine, tokenizer: Tokenizer
) -> None:
    engine.tokens, engine.delay_s, engine.ends = tokenizer.encode("a b STOP c d"), 0.002, False
    pieces = list(front.submit(Ask(prompt="x", stop=("STOP",))))
    assert [piece.finish for piece in pieces if piece.finish] == ["stop"]
    assert joined(pieces) == "a b "


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=texts, at=st.integers(0, 40), length=st.integers(1, 8))
def test_a_stop_string_anywhere_in_the_text(
    front: Front, engine: PlayedEngine, text: str, at: int, length: int
) -> None:
    engine.tokens = front.tokenizer.encode(text)
    whole = front.tokenizer.decode(engine.tokens)
    stop = whole[at : at + length]
    if not stop:
        return
    pieces = list(front.submit(Ask(prompt="x", stop=(stop,))))
    assert joined(pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish == "stop"


def test_held_text_is_released_at_the_end(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens = tokenizer.encode("almost the EN")
    pieces = list(front.submit(Ask(prompt="x", stop=("END",))))
    assert (joined(pieces), pieces[-1].finish) == ("almost the EN", "length")


def test_a_stop_string_that_the_last_token_completes(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens = tokenizer.encode("so END")
    pieces = list(front.submit(Ask(prompt="x", stop=("END",))))
    assert (joined(pieces), pieces[-1].finish) == ("so ", "stop")
    assert engine.cancelled == []


def test_a_character_that_stays_open_is_dropped(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens = tokenizer.encode("ok\U00012000")[:-1]
    assert joined(list(front.submit(Ask(prompt="x")))) == "ok"


def test_an_error_is_passed_on(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens, engine.finish, engine.error = tokenizer.encode("so far"), "error", "out of memory"
    pieces = list(front.submit(Ask(prompt="x")))
    assert (pieces[-1].finish, pieces[-1].error) == ("error", "out of memory")


def test_log_probabilities_name_their_tokens(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    paris, open_bytes = tokenizer.encode(" Paris")[0], tokenizer.encode("\U00012000")
    engine.samples = [
        Sample(paris, -0.5, ((paris, -0.5), (EOS, -1.5))),
        *(Sample(token, -1.0) for token in open_bytes),
    ]
    pieces = list(front.submit(Ask(prompt="x", logprobs=2)))
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens[0].text == " Paris"
    assert tokens[0].top == ((paris, " Paris", b" Paris", -0.5), (EOS, "<|im_end|>", b"<|im_end|>", -1.5))
    assert b"".join(token.raw for token in tokens[1:]) == "\U00012000".encode()
    assert all(token.text == "\ufffd" for token in tokens[1:])
    assert len(tokens) == len(ids_of(pieces))


def test_cancelling_ends_the_iteration(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens, engine.ends = tokenizer.encode("a b c"), False
    answer = front.submit(Ask(prompt="x"))
    pieces = []
    for piece in answer:
        pieces.append(piece)
        answer.cancel()
    assert pieces[-1].finish == "cancelled"
    assert engine.cancelled[0] == answer.id


def test_leaving_early_cancels(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens, engine.ends = tokenizer.encode("a b c"), False
    answer = front.submit(Ask(prompt="x"))
    for _ in answer:
        break
    assert (engine.cancelled, engine.finishes) == ([answer.id], ["cancelled"])


async def test_async_pieces_are_the_same(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens, engine.delay_s = tokenizer.encode("Hello 你好 😀 END world"), 0.001
    ask = Ask(prompt="x", stop=("END",), logprobs=0)
    assert [piece async for piece in front.submit(ask)] == list(front.submit(ask))


async def test_closing_the_async_iterator_early_cancels(
    front: Front, engine: PlayedEngine, tokenizer: Tokenizer
) -> None:
    engine.tokens, engine.delay_s, engine.ends = tokenizer.encode("a b c"), 0.001, False
    answer = front.submit(Ask(prompt="x"))
    pieces = aiter(answer)
    await anext(pieces)
    await pieces.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    assert engine.cancelled == [answer.id]


async def test_a_cancelled_task_cancels_its_request(front: Front, engine: PlayedEngine) -> None:
    engine.tokens, engine.ends = [], False
    answer = front.submit(Ask(prompt="x"))
    task = asyncio.create_task(anext(aiter(answer)))  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == [answer.id]


async def test_many_async_answers_side_by_side(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens, engine.delay_s = tokenizer.encode("one 你好 two"), 0.001

    async def whole() -> str:
        return "".join([piece.text async for piece in front.submit(Ask(prompt="x"))])

    assert await asyncio.gather(*(whole() for _ in range(40))) == ["one 你好 two"] * 40


def test_many_threads_each_get_their_own_answer(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    engine.tokens, engine.delay_s = tokenizer.encode("one 你好 two"), 0.001
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: joined(list(front.submit(Ask(prompt=f"prompt {n}")))), range(64)))
    assert found == ["one 你好 two"] * 64
    assert len({submission.id for submission in engine.submissions}) == 64
