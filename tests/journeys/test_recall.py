"""Chats of several turns over real HTTP at temperature 1: each turn reuses all answers before it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from foreword.base.config import CacheConfig, ScheduleConfig
from foreword.cache.identity import ALONE
from foreword.front.ask import Conversation
from foreword.front.front import read_prompt
from tests.journeys.conftest import Running, running

BLOCK = 16
OPENINGS = (
    "Write a Python function that merges two sorted lists, with a docstring and an example.",
    "Write the same loop in C, in Rust and in JavaScript, each in a block of its own.",
    "用中文写一首关于秋天的短诗，每行之后空一行。",
    "日本語で自己紹介をしてください。漢字とカタカナを使ってください。",
    "Tell a story with an emoji after each word: 😀 👩‍👩‍👧 🏳️‍🌈 🇩🇪.",
    "List five rivers.\n\nPut an empty line after each.\n\n",
    "Напиши стих о море, пожалуйста, и переведи его на немецкий.",
    "Give me JSON with nested lists, numbers such as 2.5e-3 and escaped characters.",
)
MORE = ("Go on.\n\nThe same again, longer.", "Now with emoji 🎉🎉 and in 中文.", "And as code:\n\n```python\n")


@dataclass
class Talk:
    """One chat as its user sees it."""

    server: Running
    number: int
    max_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    usable: int = 0
    """Tokens that the last turn has left in full blocks, so that the next one may find them."""

    def turn(self) -> Mapping[str, Any]:
        """Ask once; what came of it."""
        turn = len(self.messages) // 2
        opening = f"{OPENINGS[self.number % len(OPENINGS)]} (Number {self.number})"
        self.messages.append({"role": "user", "content": MORE[(self.number + turn) % 3] if turn else opening})
        end_by_rule = self.end_by_rule()
        body = {"messages": self.messages, "max_tokens": self.max_tokens, "seed": 1000 * self.number + turn}
        response = self.server.post("/v1/chat/completions", {**body, "temperature": 1, "cache": {"report": True}})
        assert response.status_code == 200, response.text
        reply = response.json()
        before, self.usable = self.usable, usable(reply)
        said = reply["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": said})
        return {"turn": turn, "usable": before, "end_by_rule": end_by_rule, **reply["cache"]}

    def end_by_rule(self) -> int:
        """Where a match would end at the latest if answers were tokenised like any text."""
        front, prompt = self.server.assembly.front, Conversation(self.messages)
        ids = zip(front.render_chat(self.messages), read_prompt(prompt, front.served, ALONE).ids, strict=False)
        return next((i for i, (plain, drawn) in enumerate(ids) if plain != drawn), 10**6)


def usable(reply: Mapping[str, Any]) -> int:
    """Prompt and answer in full blocks. Of the last drawn token nothing was computed."""
    usage = reply["usage"]
    return (usage["prompt_tokens"] + usage["completion_tokens"] - 1) // BLOCK * BLOCK


def talk(server: Running, chats: int, turns: int, max_tokens: int, together: int) -> tuple[Counter[str], list[Any]]:
    """Hold so many chats, some at a time; counts, and the turns whose reuse ended inside an earlier answer."""

    def whole(number: int) -> list[Mapping[str, Any]]:
        one = Talk(server, number, max_tokens)
        return [one.turn() for _ in range(turns)]

    with ThreadPoolExecutor(together) as pool:
        seen = [turn for chat in pool.map(whole, range(chats)) for turn in chat]
    later = [turn for turn in seen if turn["turn"]]
    short = [turn for turn in later if turn["cached_tokens"] < turn["usable"]]
    counts = Counter(
        turns=len(later),
        short=len(short),
        short_by_rule=sum(turn["end_by_rule"] < turn["usable"] for turn in later),
        recalled=sum(turn["recalled_tokens"] > 0 for turn in later),
    )
    return counts, short


def test_every_turn_reuses_the_answers_before_it(server: Running) -> None:
    before = server.metrics()
    counts, short = talk(server, chats=8, turns=3, max_tokens=24, together=8)
    assert short == []
    assert (counts["turns"], counts["recalled"]) == (16, 16)
    assert counts["short_by_rule"] > 0  # or nothing was recalled that tokenising does not give
    after = server.metrics()
    assert after["foreword_prompt_tokens_recalled_total"] > before["foreword_prompt_tokens_recalled_total"]


def test_an_answer_is_that_of_the_spliced_ids(server: Running) -> None:
    one = Talk(server, 0, 24)
    one.turn()
    one.turn()
    messages = [*one.messages, {"role": "user", "content": "Thanks!"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "cache": {"report": True}}
    served = server.assembly.front.served
    read, plain = read_prompt(Conversation(messages), served, ALONE), server.assembly.front.render_chat(messages)
    warm = server.post("/v1/chat/completions", body).json()
    assert warm["cache"]["recalled_tokens"] == read.num_recalled > 0
    assert warm["cache"]["cached_tokens"] >= one.usable
    assert served.tokenizer.spell(read.ids) == served.tokenizer.spell(plain)
    server.post("/v1/cache/flush", {})
    ids = {"prompt": list(read.ids), "max_tokens": 12, "temperature": 0}
    cold = server.post("/v1/completions", ids).json()
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"][0]["text"] == warm["choices"][0]["message"]["content"]
    # After the flush the same messages are read as if nobody had ever answered.
    again = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()
    assert again["cache"]["recalled_tokens"] == 0
    assert read_prompt(Conversation(messages), served, ALONE).ids == plain


@contextmanager
def roomy() -> Iterator[Running]:
    with running(CacheConfig(kv_cache="8192"), ScheduleConfig(max_running=16)) as server:
        yield server
        server.drained()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_hundred_chats(capsys: pytest.CaptureFixture[str]) -> None:
    with roomy() as server:
        counts, short = talk(server, chats=200, turns=3, max_tokens=32, together=16)
    with capsys.disabled():
        print(f"\n{dict(counts)}; reuse ended inside an answer: {short}")
    assert counts["turns"] == 400
    assert counts["short"] <= counts["turns"] // 100 < counts["short_by_rule"]
