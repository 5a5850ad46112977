"""From an ask to a submission: ids, chain, times."""

import pytest

from foreword.base.errors import RequestError
from foreword.cache.identity import Chain, Space
from foreword.front.ask import Ask, Caller, Conversation
from foreword.front.front import Front
from foreword.text.tokenizer import Tokenizer
from tests.front.played import PlayedEngine


def test_text_is_tokenised_hashed_and_timed(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    answer = front.submit(Ask(prompt=text))
    submission = engine.submissions[0]
    ids = tokenizer.encode(text)
    assert list(submission.chain.tokens) == ids
    assert submission.chain.hashes == Chain(Space(submission.chain.root, 4), ids).hashes
    assert len(submission.chain.hashes) == len(ids) // 4
    assert (answer.id, answer.prompt_tokens) == (submission.id, len(ids))
    assert submission.tokenize_s > 0
    assert submission.lookup_s > 0
    assert submission.arrival_s <= engine.now()
    front.submit(Ask(prompt=text), Caller(arrived_s=1.5))
    assert engine.submissions[1].arrival_s == 1.5


def test_ids_are_taken_as_they_are(front: Front, engine: PlayedEngine) -> None:
    front.submit(Ask(prompt=(1, 2, 3)))
    assert list(engine.submissions[0].chain.tokens) == [1, 2, 3]
    assert engine.submissions[0].tokenize_s == 0


def test_a_rendered_chat_is_a_prompt(front: Front, engine: PlayedEngine, tokenizer: Tokenizer) -> None:
    ids = front.render_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids).endswith("user\nHi\nassistant\n")
    front.submit(Ask(prompt=ids))
    front.submit(Ask(prompt=Conversation([{"role": "user", "content": "Hi"}])))
    assert [tuple(submission.chain.tokens) for submission in engine.submissions] == [ids, ids]
    assert engine.submissions[1].tokenize_s > 0


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    front: Front, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("megabytes were tokenised")

    monkeypatch.setattr(tokenizer, "encode", encode)
    for prompt in ("a b " * 2_000_000, Conversation([{"role": "user", "content": "a b " * 2_000_000}])):
        with pytest.raises(RequestError, match=r"8000\d+ characters; the context of 64 tokens"):
            front.submit(Ask(prompt=prompt))


def test_no_token_stands_for_more_characters_than_the_longest(tokenizer: Tokenizer) -> None:
    for text in (" " * 5000, "internationalisation" * 50, "\n" * 999):
        assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text)
