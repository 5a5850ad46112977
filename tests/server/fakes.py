"""A front without a model: one character is one token, and answers are what the test says."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from foreword.base.config import Config, ServerConfig
from foreword.base.errors import CapacityError, RequestError, Unavailable
from foreword.base.params import FinishReason
from foreword.cache.blocks import PoolState
from foreword.engine.state import EngineState
from foreword.front.ask import Ask, Piece, TokenText
from foreword.front.bounds import Bounds, check_ids, reach_of, sampling_of
from foreword.schedule.admission import Limits
from foreword.schedule.plan import Usage
from foreword.server import Service, create_app
from foreword.telemetry import Metrics

BLOCK = 4
BOUNDS = Bounds(limits=Limits(num_blocks=100, block_size=BLOCK, max_context=400), vocab_size=1000)


def token_text(text: str, top: int) -> TokenText:
    likely = ((ord(text), text, text.encode(), -0.5), (ord("z"), "z", b"z", -1.5), (ord("y"), "y", b"y", -2.5))
    return TokenText(ord(text), text, text.encode(), -0.5, likely[:top])


@dataclass(slots=True)
class FakeAnswer:
    """Sends its text a character at a time."""

    text: str
    finish: FinishReason
    usage: Usage
    logprobs: int | None = None
    endless: bool = False
    error: str | None = None
    tokenize_s: float = 0.001
    num_cancels: int = 0
    ended: bool = False

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for index, char in enumerate(self.text):
            await asyncio.sleep(0)
            tokens = () if self.logprobs is None else (token_text(char, self.logprobs),)
            yield Piece(char, tokens, usage=self.usage if index == 0 else None)
        while self.endless and not self.num_cancels:
            await asyncio.sleep(0.005)
            yield Piece("~")
        self.ended = True
        yield Piece("", (), self.finish, self.usage, self.error)

    def cancel(self) -> None:
        self.num_cancels += 1


@dataclass(slots=True)
class FakeFront:
    """Answers every prompt with `text`; caches prompts by full blocks of four characters."""

    text: str = "hello"
    finish: FinishReason = "stop"
    endless: bool = False
    full_after: int | None = None
    """Refuses with CapacityError after so many answers."""
    away: bool = False
    """Refuses with Unavailable."""
    error: str | None = None
    """What an answer that ends badly says."""
    asks: list[Ask] = field(default_factory=list[Ask])
    answers: list[FakeAnswer] = field(default_factory=list[FakeAnswer])
    messages: list[list[Mapping[str, Any]]] = field(default_factory=list[list[Mapping[str, Any]]])
    seen: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /) -> tuple[int, ...]:
        self.messages.append(list(messages))
        if messages[-1]["role"] == "assistant":
            raise RequestError("messages do not fit the model's chat template: no", field="messages")
        return tuple(ord(char) for message in messages for char in f"{message['role']}:{message['content']}\n")

    def submit(self, ask: Ask, /) -> FakeAnswer:
        ids = tuple(map(ord, ask.prompt)) if isinstance(ask.prompt, str) else ask.prompt
        if not isinstance(ask.prompt, str):
            check_ids(ids, BOUNDS.vocab_size)
        sampling = sampling_of(ask, len(ids), BOUNDS)
        reach_of(ask, len(ids))
        if self.full_after is not None and len(self.answers) >= self.full_after:
            raise CapacityError("4 requests are queued or running, the limit is 4; try again later", retry_after_s=1.4)
        if self.away:
            raise Unavailable("the server is stopping; try another one", retry_after_s=10.0)
        self.asks.append(ask)
        text = self.text[: sampling.max_tokens]
        finish = self.finish if self.finish in ("error", "cancelled") or len(text) == len(self.text) else "length"
        usage = self._usage(ids, len(text))
        answer = FakeAnswer(text, finish, usage, ask.logprobs, self.endless, self.error)
        self.answers.append(answer)
        return answer

    def _usage(self, ids: tuple[int, ...], completion: int) -> Usage:
        whole = (len(ids) - 1) // BLOCK
        match = max((_common(ids, other) // BLOCK for other in self.seen), default=0)
        cached = min(match, whole) * BLOCK
        self.seen.append(ids)
        return Usage(
            prompt_tokens=len(ids),
            cached_tokens=cached,
            computed_tokens=len(ids) - cached,
            recomputed_tokens=0,
            completion_tokens=completion,
            reason="complete" if cached == whole * BLOCK and whole else "never_seen",
            queue_s=0.001,
            lookup_s=0.002,
            prefill_s=0.003,
            first_token_s=0.004,
        )


@dataclass(slots=True)
class FakeEngine:
    """Alive or not."""

    alive: bool = True
    caching: bool = True

    def state(self) -> EngineState:
        return EngineState(self.alive, 1, 2, PoolState(total=10, free=5, cached=3, held=2), self.caching)


@dataclass(slots=True)
class World:
    """One app with all its fakes."""

    front: FakeFront = field(default_factory=FakeFront)
    engine: FakeEngine = field(default_factory=FakeEngine)
    metrics: Metrics = field(default_factory=Metrics)
    config: Config = field(default_factory=lambda: Config(server=ServerConfig(max_body_bytes=100_000)))

    def app(self) -> FastAPI:
        service = Service(
            front=self.front,
            engine=self.engine,
            metrics=self.metrics,
            models=("tiny", "alias/tiny"),
            config=self.config,
            effective={"device": "cpu"},
        )
        return create_app(service)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app(), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
