"""A front without a model: one character is one token, and answers are what the test says."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from foreword.base.config import Config, ServerConfig
from foreword.base.errors import CapacityError, NotFound, RequestError, Unavailable
from foreword.base.ids import BlockHash, RequestId
from foreword.base.params import FinishReason
from foreword.cache.blocks import PoolState
from foreword.cache.departed import Left
from foreword.cache.expiry import NEVER
from foreword.cache.explain import Explanation
from foreword.cache.identity import Tenant
from foreword.cache.pins import Pinned
from foreword.cache.prefix_cache import Flushed
from foreword.cache.view import Node, Order
from foreword.engine.state import EngineState, LiveRequest, TenantState
from foreword.front.advice import Advice
from foreword.front.ask import Ask, Caller, Conversation, Piece, TokenText
from foreword.front.bounds import Bounds, check_ids, reach_of, sampling_of
from foreword.front.keeper import Finding, Prefix, Sight
from foreword.front.operator import Head, PublicHead
from foreword.front.where import Where
from foreword.schedule.admission import Limits
from foreword.schedule.plan import Usage
from foreword.server import KeyFile, Service, create_app
from foreword.telemetry import Metrics

BLOCK = 4
BOUNDS = Bounds(limits=Limits(num_blocks=100, block_size=BLOCK, max_context=400), vocab_size=1000)

WHERE = Where(message=1, role="user", offset=3, cached="the 14:02", prompt="the 14:03")
ADVICE = Advice(
    kind="changed",
    message=0,
    role="system",
    offset=7,
    end=12,
    at_token=5,
    before="14:02",
    now="14:03",
    num_calls=4,
    tokens_per_call=693,
    text="Message 0 (system), characters 7 to 11, changed.",
)
LIVE = LiveRequest(
    id=RequestId("r1"),
    tenant="red",
    key="nightly",
    phase="prefill",
    prompt_tokens=20,
    cached_tokens=8,
    computed_tokens=4,
    completion_tokens=0,
    age_s=1.5,
)
NODE = Node(
    name=BlockHash(bytes([1]) * 32),
    parent=None,
    owner="red",
    num_blocks=3,
    begins=(1, 2),
    hits=5,
    last_used_s=0.0,
    held=False,
    pinned=True,
    priority=50,
    ttl_s=NEVER,
    num_children=2,
)


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

    def where(self, explanation: Explanation, /) -> Where | None:
        return None if explanation.reason == "complete" else WHERE

    def advice(self) -> Advice | None:
        return ADVICE


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
    callers: list[Caller] = field(default_factory=list[Caller])
    answers: list[FakeAnswer] = field(default_factory=list[FakeAnswer])
    messages: list[list[Mapping[str, Any]]] = field(default_factory=list[list[Mapping[str, Any]]])
    seen: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def submit(self, ask: Ask, caller: Caller, /) -> FakeAnswer:
        ids = self._ids(ask.prompt)
        sampling = sampling_of(ask, len(ids), BOUNDS)
        reach_of(ask, len(ids))
        if self.full_after is not None and len(self.answers) >= self.full_after:
            raise CapacityError("there are 4 requests queued or running, the limit is 4; try later", retry_after_s=1.4)
        if self.away:
            raise Unavailable("the server is stopping; try another one", retry_after_s=10.0)
        self.asks.append(ask)
        self.callers.append(caller)
        text = self.text[: sampling.max_tokens]
        finish = self.finish if self.finish in ("error", "cancelled") or len(text) == len(self.text) else "length"
        usage = self._usage(ids, len(text))
        answer = FakeAnswer(text, finish, usage, ask.logprobs, self.endless, self.error)
        self.answers.append(answer)
        return answer

    def _ids(self, prompt: str | tuple[int, ...] | Conversation) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(map(ord, prompt))
        if isinstance(prompt, tuple):
            check_ids(prompt, BOUNDS.vocab_size)
            return prompt
        self.messages.append(list(prompt.messages))
        if prompt.messages[-1]["role"] == "assistant":
            raise RequestError("messages do not fit the model's chat template: no", field="messages")
        return tuple(ord(char) for message in prompt.messages for char in f"{message['role']}:{message['content']}\n")

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
            explanation=Explanation("complete" if cached == whole * BLOCK and whole else "never_seen", cached),
            queue_s=0.001,
            tokenize_s=0.0005,
            lookup_s=0.002,
            prefill_s=0.003,
            first_token_s=0.004,
        )


@dataclass(slots=True)
class FakeEngine:
    """Alive or not."""

    alive: bool = True
    caching: bool = True
    ready: bool = True
    tenants: dict[str, TenantState] = field(default_factory=dict[str, TenantState])
    pinned: dict[str, int] = field(default_factory=dict[str, int])
    requests: list[LiveRequest] = field(default_factory=list[LiveRequest])

    def now(self) -> float:
        return 12.5

    def live(self, tenant: str | None, limit: int, /) -> tuple[tuple[LiveRequest, ...], int]:
        own = [one for one in self.requests if tenant in (None, one.tenant)]
        return tuple(own[:limit]), len(own)

    def state(self) -> EngineState:
        return EngineState(
            self.alive, 1, 2, PoolState(total=10, free=5, cached=3, held=2), self.caching, self.pinned, {}, self.tenants
        )


@dataclass(slots=True)
class FakeOperator:
    """Remembers what it was told."""

    heads: list[PublicHead] = field(default_factory=list[PublicHead])
    max_public_blocks: int = 25
    root: BlockHash = field(default_factory=lambda: BlockHash(b"new"))
    fails: Exception | None = None

    @property
    def num_public_blocks(self) -> int:
        return sum(head.num_blocks for head in self.heads)

    def mark(self, head: Head, /) -> PublicHead:
        if head == "short":
            raise RequestError("the head has 1 token, less than a block", field="prompt")
        self.heads.append(PublicHead(head, 9, 2))
        return self.heads[-1]

    def unmark(self, head: Head, /) -> int:
        found = [public for public in self.heads if public.head == head]
        if not found:
            raise NotFound("this head is not public", field="prompt")
        self.heads.remove(found[0])
        return 2

    def reload(self) -> BlockHash:
        if self.fails is not None:
            raise self.fails
        return self.root


@dataclass(slots=True)
class FakeKeeper:
    """Remembers what it was asked to do."""

    front: FakeFront
    calls: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])

    def lookup(self, ask: Ask, caller: Caller, /) -> Finding:
        self.calls.append(("lookup", ask.prompt, caller.tenant.name))
        said = Explanation("evicted", 4, Left("pressure", 3.0))
        return Finding(prompt_tokens=9, cached_tokens=4, explanation=said, left_ago_s=2.5, where=WHERE)

    def warm(self, ask: Ask, caller: Caller, /) -> FakeAnswer:
        self.calls.append(("warm", ask.prompt, caller.tenant.name, ask.ttl, ask.priority, ask.key))
        answer = self.front.submit(ask, caller)
        answer.text = ""
        return answer

    def pin(self, prefix: Prefix, tenant: Tenant, ttl_s: float | None, /) -> Pinned:
        self.calls.append(("pin", prefix, tenant.name, ttl_s))
        if prefix == "too much":
            raise RequestError("the prefix has 99 blocks; 0 are pinned and 25 may be", field="prompt")
        return Pinned(done=True, num_blocks=2, num_cached=1, num_pinned=2, budget=25)

    def unpin(self, prefix: Prefix, tenant: Tenant, /) -> int:
        self.calls.append(("unpin", prefix, tenant.name))
        return 2

    def flush(self, prefix: Prefix | None, tenant: Tenant | None, /) -> Flushed:
        self.calls.append(("flush", prefix, None if tenant is None else tenant.name))
        if prefix == BlockHash(bytes(32)):
            raise NotFound("there is no such block", field="block")
        return Flushed(dropped=3, still_held=1)

    def tree(
        self, tenant: Tenant | None, start: BlockHash | None, limit: int, order: Order, /
    ) -> tuple[tuple[Sight, ...], bool]:
        self.calls.append(("tree", None if tenant is None else tenant.name, start, limit, order))
        return (Sight(NODE, "hello", 1.5),), False

    def waste(self) -> tuple[int, int]:
        return (1, 4 * ADVICE.tokens_per_call)

    def advice(self, tenant: Tenant | None, /) -> tuple[tuple[str, Advice], ...]:
        self.calls.append(("advice", None if tenant is None else tenant.name))
        return (("red", ADVICE),) if tenant is None else ()


@dataclass(slots=True)
class World:
    """One app with all its fakes."""

    front: FakeFront = field(default_factory=FakeFront)
    engine: FakeEngine = field(default_factory=FakeEngine)
    operator: FakeOperator = field(default_factory=FakeOperator)
    keeper: FakeKeeper = field(init=False)
    warm: bool = True
    metrics: Metrics = field(default_factory=Metrics)
    keys: KeyFile | None = None
    limits: Limits = BOUNDS.limits
    config: Config = field(default_factory=lambda: Config(server=ServerConfig(max_body_bytes=100_000)))

    def __post_init__(self) -> None:
        self.keeper = FakeKeeper(self.front)

    def app(self) -> FastAPI:
        service = Service(
            front=self.front,
            engine=self.engine,
            operator=self.operator,
            keeper=self.keeper,
            warmed=lambda: self.warm,
            metrics=self.metrics,
            prefill_flops=lambda num_tokens: 1000 * num_tokens,
            limits=self.limits,
            keys=self.keys,
            models=("tiny", "alias/tiny"),
            config=self.config,
            effective=lambda: {"device": "cpu", "root": "old"},
        )
        return create_app(service)

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app(), raise_app_exceptions=False)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
