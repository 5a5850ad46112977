"""The verbs of the library, on the embedded model: what they say comes true."""

import pytest

from foreword import LLM
from foreword.base.errors import NotFound, RequestError

HEAD = "The tower of Skarvnes was built in 1874 and stands forty-one metres above the sea. Its keeper was Ingrid. " * 3
SYSTEM = {"role": "system", "content": HEAD}


@pytest.fixture(autouse=True)
def _empty(llm: LLM) -> None:
    llm.flush()


def test_a_lookup_says_what_a_request_then_finds_and_changes_nothing(llm: LLM) -> None:
    assert llm.lookup(HEAD + "When?").cached_tokens == 0
    llm.generate(HEAD + "Who was it?", max_tokens=1)
    before = llm.assembly.worker.state()
    found = llm.lookup(HEAD + "When?")
    assert llm.assembly.worker.state() == before
    answer = llm.generate(HEAD + "When?", max_tokens=1, cache={"report": True})[0]
    assert found.cached_tokens == answer.cached_tokens > 32
    assert found.explanation.at_token == answer.explanation.at_token == answer.cached_tokens
    assert found.where == answer.where


def test_warm_computes_a_prompt_without_an_answer_once(llm: LLM) -> None:
    warm = llm.warm([SYSTEM])
    assert (warm.text, warm.token_ids, warm.completion_tokens) == ("", (), 0)
    assert warm.cached_tokens == 0
    assert warm.stored_tokens == warm.prompt_tokens // 16 * 16
    first = llm.chat([SYSTEM, {"role": "user", "content": "Who was the keeper?"}], max_tokens=4)
    assert first.cached_tokens >= warm.stored_tokens > 32
    again = llm.warm([SYSTEM])
    assert again.cached_tokens >= warm.stored_tokens - 16
    cold = llm.chat([SYSTEM, {"role": "user", "content": "Who was the keeper?"}], max_tokens=4, cache={"read": False})
    assert (cold.cached_tokens, cold.reason, cold.text) == (0, "read_disabled", first.text)


def test_pinning_has_a_budget_and_ends(llm: LLM) -> None:
    pinned = llm.pin(HEAD)
    assert pinned.num_cached == 0  # nothing of it was computed yet: it will be pinned then
    llm.warm(HEAD)
    assert llm.lookup(HEAD + " And?").cached_tokens >= pinned.num_blocks * 16
    assert llm.pin(HEAD).num_cached == pinned.num_blocks == pinned.num_pinned
    with pytest.raises(RequestError, match=r"pinned and .* may be"):
        llm.pin([5] * 16 * (pinned.budget + 1))
    assert llm.unpin(HEAD) == pinned.num_blocks
    with pytest.raises(NotFound, match="not pinned"):
        llm.unpin(HEAD)
    with pytest.raises(RequestError, match="must fill a block"):
        llm.pin("short")


def test_a_flush_of_a_prefix_leaves_the_rest(llm: LLM) -> None:
    other = "Some prose about something else, long enough to fill a block or two of the cache. " * 2
    for prompt in (HEAD, other):
        llm.generate(prompt, max_tokens=1)
    flushed = llm.flush(HEAD)
    assert flushed.dropped >= llm.lookup(HEAD).prompt_tokens // 16
    gone, kept = llm.lookup(HEAD), llm.lookup(other)
    assert (gone.cached_tokens, gone.explanation.reason) == (0, "flushed")
    assert gone.left_ago_s is not None
    assert kept.cached_tokens == (kept.prompt_tokens - 1) // 16 * 16 > 0


def test_where_names_message_role_and_character(llm: LLM) -> None:
    def talk(stamp: str) -> list[dict[str, str]]:
        return [
            SYSTEM,
            {"role": "user", "content": f"It is now {stamp} o'clock. Café straße 日本: who keeps the light?"},
        ]

    llm.chat(talk("14"), max_tokens=1)
    answer = llm.chat(talk("15"), max_tokens=1, cache={"report": True})
    where = answer.where
    assert answer.reason == "diverged"
    assert where is not None
    assert (where.message, where.role) == (1, "user")
    content = talk("15")[1]["content"]
    assert where.offset is not None
    assert content[: where.offset] == talk("14")[1]["content"][: where.offset]
    assert content[where.offset] == "5"
    assert "14 o" in (where.cached or "")
    assert "15 o" in where.prompt
    assert llm.chat(talk("15"), max_tokens=1, cache={"report": True, "read": False}).where is None
    llm.generate(HEAD + "日本語 one of those that are long enough to fill the block that they stand in", max_tokens=1)
    raw = llm.generate(HEAD + "日本語 two three four five six", max_tokens=1, cache={"report": True})[0].where
    assert raw is not None
    assert (raw.message, raw.offset) == (None, len(HEAD + "日本語"))
    ids = [7] * 20
    llm.generate([ids + [8] * 20], max_tokens=1)
    by_ids = llm.generate([ids + [9] * 20], max_tokens=1, cache={"report": True})[0].where
    assert by_ids is not None
    assert (by_ids.message, by_ids.offset) == (None, None)
    assert by_ids.cached != by_ids.prompt


def test_wishes_are_checked_by_name_and_range(llm: LLM) -> None:
    for cache, text in (
        ({"stor": False}, "cache.stor is unknown; did you mean store?"),
        ({"ttl": 0}, "above 0"),
        ({"priority": 101}, "at most 100"),
        ({"key": ""}, "at most 64 characters"),
        ({"read": 1}, "true or false"),
    ):
        with pytest.raises(RequestError, match=text.replace("?", r"\?")):
            llm.generate("a", cache=cache)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="differ"):
        llm.generate("a b c d", prefix_length=1, cache={"prefix_length": 2})
    fresh = "Nobody has flushed this one before. " + HEAD
    quiet = llm.generate(fresh, max_tokens=1, cache={"store": False})[0]
    after = llm.generate(fresh, max_tokens=1)[0]
    assert (quiet.stored_tokens, after.cached_tokens, after.reason) == (0, 0, "not_stored")
    assert after.stored_tokens > 0


def test_advice_names_what_keeps_changing(llm: LLM) -> None:
    told = [llm.generate(f"Call {n}. {HEAD}", max_tokens=1, cache={"report": True})[0].advice for n in range(5)]
    assert told[:3] == [None] * 3
    assert told[4] is not None
    assert (told[4].kind, told[4].num_calls, told[4].message) == ("changed", 4, None)
    assert llm.advice() == (told[4],)
    silent = llm.generate(f"Call 6. {HEAD}", max_tokens=1)[0]
    assert (silent.reason, silent.advice) == ("diverged", None)  # it asked for no report
    llm.generate(f"Call 7. {HEAD}", max_tokens=1, cache={"store": False})
    assert [said.num_calls for said in llm.advice()] == [5]
    llm.flush()
    assert llm.advice() == ()
