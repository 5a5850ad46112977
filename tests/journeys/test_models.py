"""What a client sees of models that are not plain attention: hits that are right, or none and the reason.

Kinds of fault that users of other engines met: wrong text after a hit because only a part of a layer's state was
restored; and identical chats recomputed whole without a word about why.
"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from foreword.base.config import CacheConfig, ScheduleConfig
from tests.journeys.conftest import Running, running
from tests.runner import models, plain_models

COUNT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    family: str
    reason: str | None
    """What must be said about it; None: its prefixes are reused."""
    model: Any
    server: Running
    said: list[str]
    """What the log says at the start."""

    def oracle(self, tokens: list[int]) -> str:
        """The same request, alone, by the library's own hands."""
        return "".join(f"t{token}" for token in plain_models.answer(self.model, tokens, COUNT))


def _windows(family: str) -> Callable[[], Any]:
    def build() -> Any:
        config = models.CONFIGS[family]()
        config.tie_word_embeddings = False
        return models.build(config)

    return build


FAMILIES: Mapping[str, tuple[str | None, Callable[[], Any]]] = {
    "qwen3": (None, _windows("qwen3")),
    "gemma2": (None, _windows("gemma2")),
    "gemma3": (None, _windows("gemma3")),
    "mistral": (None, _windows("mistral")),
    "mamba2": ("running sum", lambda: plain_models.build("mamba2")),
    "lfm2": ("convolution", lambda: plain_models.build("lfm2")),
    "qwen3_next": ("running sum", lambda: plain_models.build("qwen3_next")),
    "longrope": ("longrope", lambda: plain_models.build("longrope")),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    reason, build = FAMILIES[request.param]
    model = build()
    folder = plain_models.save(model, tmp_path_factory.mktemp(request.param))
    said, log, heard = list[str](), logging.getLogger("foreword"), logging.NullHandler()
    heard.handle = lambda record: said.append(record.getMessage()) or True
    log.addHandler(heard)
    with running(CacheConfig(kv_cache="64"), ScheduleConfig(max_context=256), model=str(folder)) as server:
        yield Served(family=request.param, reason=reason, model=model, server=server, said=said)
    log.removeHandler(heard)


def words(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(5, 500) for _ in range(count)]


def test_hybrid_recurrent_and_window_state_is_restored_whole_or_not_at_all(served: Served) -> None:
    """The same request three times, then others with the same beginning."""
    server, head = served.server, words(70, seed=1)
    tails = [head + words(n, seed=n) for n in (1, 20, 33)]
    expected = served.oracle(tails[0])
    for number in range(3):
        reply = complete(server, tails[0])
        assert reply["choices"][0]["text"] == expected
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == (served.reason is None and number > 0)
        assert served.reason is None or reply["cache"]["reason"] == "model_not_cacheable"
    for tokens in tails:
        assert complete(server, tokens)["choices"][0]["text"] == served.oracle(tokens)
    server.drained()


def test_an_identical_chat_hits_or_says_why_not(served: Served) -> None:
    """Row 27: the same body twice, and once with a longer last message; and what log and `/v1/cache` say of it."""
    server = served.server
    server.assembly.worker.flush()
    text = " ".join(f"t{token}" for token in words(60, seed=2))
    longer = text + " " + " ".join(f"t{token}" for token in words(12, seed=3))
    seen = [chat(server, content) for content in (text, text, longer)]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in seen]
    state = server.get("/v1/cache").json()
    assert seen[0]["choices"] == seen[1]["choices"]
    told = [line for line in served.said if "every prompt is computed whole" in line]
    if served.reason is None:
        assert told == []
        assert cached == [0, 61, 61]
        assert (state["cacheable"], state["not_cacheable"]) == (True, None)
    else:
        [line] = told
        assert served.reason in line
        assert cached == [0, 0, 0]
        assert {reply["cache"]["reason"] for reply in seen} == {"model_not_cacheable"}
        assert state["cacheable"] is False
        assert served.reason in state["not_cacheable"]
    rows = server.metrics()
    assert (rows["foreword_prompt_tokens_cached_total"] > 0) == (served.reason is None)


def complete(server: Running, tokens: list[int]) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "cache": {"report": True}}
    return server.post("/v1/completions", body).json()


def chat(server: Running, content: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return server.post("/v1/chat/completions", {**body, "ignore_eos": True, "cache": {"report": True}}).json()
