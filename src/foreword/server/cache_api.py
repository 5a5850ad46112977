"""Verbs over the cache: look up, warm, pin, unpin, flush; the tree, advice, and the requests under way.

A tenant looks up, warms, flushes and sees what is its own; an admin key does it for any tenant, and pins. Of what is
another tenant's nobody learns even that it is there.
"""

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import anyio.to_thread
from fastapi import Query, Request
from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from foreword.base.errors import RequestError
from foreword.base.ids import BlockHash
from foreword.cache.expiry import NEVER
from foreword.cache.identity import Tenant
from foreword.cache.view import Order
from foreword.engine.state import Phase
from foreword.front.ask import Ask, Caller, Conversation
from foreword.front.keeper import Prefix, Sight
from foreword.server.auth import caller, principal, whose
from foreword.server.delivery import gathered, opened
from foreword.server.errors import renamed
from foreword.server.intake import read
from foreword.server.openai.generation import check_model_name
from foreword.server.openai.requests import Ids, Messages, Tools, check_tools, conversation
from foreword.server.report import advice_of, left_of, where_of
from foreword.server.service import Answer, service_of
from foreword.server.wire import (
    TTL,
    AdviceReply,
    Keeping,
    LeftReply,
    PrefixLength,
    Reply,
    Text,
    WhereReply,
    Wire,
    check_one,
    described_as_one,
)

ResultT = TypeVar("ResultT")


def _check_block(value: str) -> str:
    if re.fullmatch("[0-9a-f]{64}", value) is None:
        raise PydanticCustomError("block", "a block is 64 hex digits, as GET /v1/cache/tree shows them")
    return value


Block = Annotated[str, AfterValidator(_check_block), WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{64}$"})]
TenantName = Annotated[str, Field(min_length=1, max_length=256)]

MAX_NODES = 1_000
"""Nodes of one view of the tree at most, and requests of one list."""


def _tell_choices(schema: dict[str, Any], form: "type[Prompted]") -> None:
    if form.needed:
        described_as_one(schema, form.choices())


class Prompted(Wire):
    """A prompt in one of its forms, and whose namespace it is in."""

    model_config = ConfigDict(json_schema_extra=_tell_choices)

    prompt: Text | None = None
    """Raw text, tokenised as `/v1/completions` does."""
    ids: Ids | None = None
    """Token ids, as they are."""
    messages: Messages | None = None
    """A conversation, through the model's chat template."""
    tools: Tools | None = None
    """With `messages`: what the model may call."""
    tenant: TenantName | None = None
    """Whose; another than one's own needs an admin key."""

    needed: ClassVar[bool] = True
    """Whether one must be given."""

    @model_validator(mode="after")
    def _check_one(self) -> "Prompted":
        check_one(self, self.choices(), needed=self.needed)
        check_tools(self.tools, self.messages)
        return self

    @classmethod
    def choices(cls) -> list[str]:
        """The fields that name a prompt, of which one is given."""
        return [name for name in ("prompt", "ids", "messages", "block") if name in cls.model_fields]

    def source(self) -> str | tuple[int, ...] | Conversation:
        """The prompt as a value."""
        if self.ids is not None:
            return tuple(self.ids)
        return (self.prompt or "") if self.messages is None else conversation(self.messages, self.tools)


class LookupRequest(Prompted):
    """`POST /v1/cache/lookup`."""

    prefix_length: PrefixLength | None = None
    """As in a request: what is read never passes so many tokens."""


class WarmRequest(Prompted, Keeping):
    """`POST /v1/cache/warm`, and one entry of the file of `--warm`."""

    def ask(self) -> Ask:
        """The same as a value."""
        return Ask(prompt=self.source(), **{name: getattr(self, name) for name in Keeping.model_fields})


class PrefixRequest(Prompted):
    """`POST /v1/cache/unpin`: a prefix by its prompt or by a block of the tree."""

    block: Block | None = None
    """A block of `GET /v1/cache/tree`, with all that it continues."""

    def prefix(self) -> Prefix:
        """The same as a value."""
        return self.source() if self.block is None else BlockHash(bytes.fromhex(self.block))


class PinRequest(PrefixRequest):
    """`POST /v1/cache/pin`."""

    ttl: TTL | None = None
    """Seconds until the pin ends by itself; left out, it ends when it is unpinned."""


class FlushRequest(PrefixRequest):
    """`POST /v1/cache/flush`: without any field, all that the key may forget."""

    needed: ClassVar[bool] = False

    model: str | None = None
    """One of `GET /v1/models`."""

    @property
    def names_prefix(self) -> bool:
        """Whether it is about a prefix, and not about all."""
        return not self.model_fields_set.isdisjoint(self.choices())


class LookupReply(Reply):
    """What a request would find at this moment."""

    object: Literal["cache.lookup"] = "cache.lookup"
    prompt_tokens: int
    cached_tokens: int
    reason: str
    """Why the match would end there."""
    at_token: int
    left: LeftReply | None
    where: WhereReply | None


class WarmReply(Reply):
    """What is warm now."""

    object: Literal["cache.warmed"] = "cache.warmed"
    prompt_tokens: int
    cached_tokens: int
    """Known before."""
    computed_tokens: int
    stored_tokens: int
    """Stored by this call, in full blocks."""
    seconds: float


class PinReply(Reply):
    """What is pinned now, in blocks."""

    object: Literal["cache.pinned"] = "cache.pinned"
    tenant: str
    """In whose namespace; "" on a server without keys."""
    blocks: int
    """Of the prefix."""
    cached: int
    """Of those: cached now; the rest is pinned once it is computed."""
    pinned: int
    """Of all pins of this tenant."""
    budget: int
    """How many those may be."""


class UnpinReply(Reply):
    """What is pinned no longer, in blocks."""

    object: Literal["cache.unpinned"] = "cache.unpinned"
    tenant: str
    """In whose namespace; "" on a server without keys."""
    unpinned: int
    """Less than the prefix has where another pin covers a part."""


class FlushReply(Reply):
    """What a flush did, in blocks."""

    object: Literal["cache.flushed"] = "cache.flushed"
    dropped: int
    still_held: int
    """Running requests go on reading these; nobody else finds them."""


class NodeReply(Reply):
    """A run of blocks that is not branched."""

    block: str
    """Its last block, for `pin`, `unpin`, `flush` and `start`."""
    parent: str | None
    """The `block` of the run that it continues; null at the top."""
    owner: str
    """Its tenant, "public", or "" on a server without keys."""
    tokens: int
    text: str
    """How it begins."""
    hits: int | None
    """Requests whose match passed here. null, as the next two, where a tenant looks at public blocks: who else uses
    them, and when, is not its business."""
    idle_s: float | None
    """Seconds since its last use."""
    held: bool | None
    """Whether a running request uses it now."""
    pinned: bool
    priority: int
    ttl: float | None
    children: int
    """Runs that continue it."""


class TreeReply(Reply):
    """The tree of cached prefixes from the top down: the most lately used first, or those with the most hits."""

    object: Literal["cache.tree"] = "cache.tree"
    block_size: int
    nodes: list[NodeReply]
    more: bool
    """Whether `limit` has cut anything off."""


class OwnedAdvice(AdviceReply):
    """Advice, and whom it is for."""

    tenant: str
    """"" on a server without keys."""


class AdviceList(Reply):
    """What keeps ending matches, the dearest first for each tenant."""

    object: Literal["cache.advice"] = "cache.advice"
    advice: list[OwnedAdvice]


class LiveReply(Reply):
    """One request that is not over."""

    id: str
    """The engine's own name for it, one for each prompt."""
    tenant: str
    """"" on a server without keys."""
    key: str
    """The label that it was sent with."""
    phase: Phase
    """`waiting` holds nothing; `prefill`: the prompt is computed; `decode`: the answer is."""
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    """Of the prompt, so far."""
    completion_tokens: int
    """So far."""
    age_s: float


class LiveList(Reply):
    """The requests that are not over, the oldest first."""

    object: Literal["cache.requests"] = "cache.requests"
    requests: list[LiveReply]
    total: int
    """How many there are, in the list or not."""


async def lookup(request: Request) -> LookupReply:
    """What a request would find, and why no more; computes nothing and changes nothing."""
    service = service_of(request)
    form = await read(request, LookupRequest)
    ask = Ask(prompt=form.source(), prefix_length=form.prefix_length)
    who = _on_behalf(request, form.tenant)
    found = await _asked(form, lambda: service.keeper.lookup(ask, who))
    return LookupReply(
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.cached_tokens,
        reason=found.explanation.reason,
        at_token=found.explanation.at_token,
        left=left_of(found.explanation, found.left_ago_s),
        where=where_of(found.where),
    )


async def warm(request: Request) -> WarmReply:
    """Compute a prompt and keep it, without an answer."""
    service = service_of(request)
    form = await read(request, WarmRequest)
    who = _on_behalf(request, form.tenant)

    def submit(answers: list[Answer]) -> None:
        answers.append(service.keeper.warm(form.ask(), who))

    try:
        answers = await opened(submit)
    except RequestError as error:
        raise _named(error, form) from None
    usage = (await gathered(request.receive, answers))[0].usage
    return WarmReply(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        stored_tokens=usage.stored_tokens,
        seconds=usage.first_token_s,
    )


async def pin(request: Request) -> PinReply:
    """Let a prefix be evicted last."""
    service = service_of(request)
    form = await read(request, PinRequest)
    tenant = _whose(request, form.tenant)
    pinned = await _asked(form, lambda: service.keeper.pin(form.prefix(), tenant, form.ttl))
    return PinReply(
        tenant=tenant.name,
        blocks=pinned.num_blocks,
        cached=pinned.num_cached,
        pinned=pinned.num_pinned,
        budget=pinned.budget,
    )


async def unpin(request: Request) -> UnpinReply:
    """Let a pinned prefix be evicted in its turn."""
    service = service_of(request)
    form = await read(request, PrefixRequest)
    tenant = _whose(request, form.tenant)
    unpinned = await _asked(form, lambda: service.keeper.unpin(form.prefix(), tenant))
    return UnpinReply(tenant=tenant.name, unpinned=unpinned)


async def flush(request: Request) -> FlushReply:
    """Forget a prefix, all of a tenant, or everything."""
    service, who = service_of(request), principal(request)
    form = await read(request, FlushRequest, default=b"{}")
    check_model_name(form.model, service)
    prefix = form.prefix() if form.names_prefix else None
    everything = form.tenant is None and prefix is None and who.admin
    tenant = None if everything else _whose(request, form.tenant)
    flushed = await _asked(form, lambda: service.keeper.flush(prefix, tenant))
    return FlushReply(dropped=flushed.dropped, still_held=flushed.still_held)


async def get_tree(
    request: Request,
    tenant: str | None = None,
    start: Block | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_NODES)] = 100,
    order: Order = "used",
) -> TreeReply:
    """The tree of cached prefixes, as much of it as the key may see."""
    service, who = service_of(request), principal(request)
    view = None if tenant is None and who.admin else _whose(request, tenant)
    top = None if start is None else BlockHash(bytes.fromhex(start))
    sights, more = await _run(lambda: service.keeper.tree(view, top, limit, order))
    size = service.limits.block_size
    return TreeReply(block_size=size, nodes=[_node(sight, size) for sight in sights], more=more)


async def get_advice(request: Request, tenant: str | None = None) -> AdviceList:
    """What keeps ending the matches of the key's tenant, and what to change; to an operator that of all."""
    service, who = service_of(request), principal(request)
    whom = None if tenant is None and who.admin else _whose(request, tenant)
    found = await _run(lambda: service.keeper.advice(whom))
    return AdviceList(advice=[OwnedAdvice(tenant=owner, **advice_of(said).model_dump()) for owner, said in found])


async def get_requests(
    request: Request, tenant: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_NODES)] = 100
) -> LiveList:
    """The requests under way: to an operator all, to a tenant its own."""
    service, who = service_of(request), principal(request)
    name = None if tenant is None and who.admin else _whose(request, tenant).name
    found, total = service.engine.live(name, limit)
    return LiveList(requests=[LiveReply.model_validate(asdict(one)) for one in found], total=total)


def _node(sight: Sight, block_size: int) -> NodeReply:
    node = sight.node
    return NodeReply(
        block=node.name.hex(),
        parent=None if node.parent is None else node.parent.hex(),
        owner=node.owner,
        tokens=node.num_blocks * block_size,
        text=sight.text,
        hits=node.hits,
        idle_s=sight.idle_s,
        held=node.held,
        pinned=node.pinned,
        priority=node.priority,
        ttl=None if node.ttl_s == NEVER else node.ttl_s,
        children=node.num_children,
    )


def _whose(request: Request, name: str | None) -> Tenant:
    """The caller's own tenant, or for an admin any other. Raises Refused."""
    return principal(request).tenant if name is None else whose(request, service_of(request).keys, name)


def _on_behalf(request: Request, name: str | None) -> Caller:
    own, tenant = caller(request), _whose(request, name)
    return own if tenant == own.tenant else Caller(tenant=tenant, arrived_s=own.arrived_s)


def _named(error: RequestError, form: Prompted) -> RequestError:
    return error if form.ids is None else renamed(error, {"prompt": "ids"})


async def _asked(form: Prompted, work: Callable[[], ResultT]) -> ResultT:
    """Do it; an error about the prompt names the field that held it."""
    try:
        return await _run(work)
    except RequestError as error:
        raise _named(error, form) from None


async def _run(work: Callable[[], ResultT]) -> ResultT:
    return await anyio.to_thread.run_sync(work)
