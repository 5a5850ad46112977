"""What the server says about itself: `GET /health`, `/ready`, `/metrics` and `/v1/cache`."""

from dataclasses import asdict
from typing import Any, Literal

from fastapi import Request
from starlette.responses import JSONResponse, Response

from foreword.cache.departed import Cause
from foreword.cache.explain import Reason
from foreword.engine.state import EngineState, TenantState
from foreword.server.auth import principal, whose
from foreword.server.paths import routes_of
from foreword.server.service import Service, Setting, service_of
from foreword.server.wire import Reply
from foreword.telemetry.metrics import CONTENT_TYPE, HitClass


class Blocks(Reply):
    """The device pool in blocks; `free + cached + held == capacity`."""

    capacity: int
    free: int
    cached: int
    held: int
    pinned: int
    """Blocks of pinned prefixes, cached or not."""
    pin_budget: int
    """How many those may be."""


class ModelFacts(Reply):
    """One served model."""

    id: str
    cacheable: bool
    """Whether its prefixes can be reused."""
    not_cacheable: str | None
    """Why not, where they cannot."""
    namespace: str
    """The root of its block hashes: what was computed under another root is never found."""


class Requests(Reply):
    """Who is in the engine."""

    waiting: int
    running: int


class TenantBlocks(Reply):
    """One tenant's part of the pool."""

    share: int
    """Blocks that it is sure of."""
    cached: int
    """Blocks that it has in the cache and nobody uses at this moment."""
    held: int
    """Blocks that its requests use."""
    pinned: int
    """Blocks of its pinned prefixes, cached or not."""


class TenantRequests(Requests):
    """One tenant's requests in the engine."""

    limit: int
    """How many they may be together."""


class TokensReply(Reply):
    """Prompt tokens since the server's start."""

    cached: int
    computed: int


class Tenant(Reply):
    """One tenant: nothing but its own."""

    tenant: str
    prompt_tokens: TokensReply
    blocks: TenantBlocks
    requests: TenantRequests
    max_context: int
    """Tokens that one request of it may have."""


class CacheFacts(Reply):
    """What anybody with a key may know of the cache."""

    object: Literal["cache"] = "cache"
    model: str
    enabled: bool
    """Whether prefixes are reused: the setting, and that no fault has stopped it."""
    cacheable: bool
    """Whether this model's prefixes can be."""
    not_cacheable: str | None
    """Why not, where they cannot."""
    block_size: int


class TenantCache(CacheFacts, Tenant):
    """The answer of `GET /v1/cache` to a tenant, or about one."""


class ReasonTotal(Reply):
    """The requests whose match ended for one reason."""

    requests: int
    tokens: int
    """Of their prompts, computed."""


class TtftTotal(Reply):
    """The first tokens of one class of hits: `seconds / requests` is the mean time to one."""

    requests: int
    seconds: float


class TotalsReply(Reply):
    """What has been counted since the server's start."""

    prompt_tokens: TokensReply
    saved_seconds: float
    """What the cached tokens would have cost, as `saved` in the answers."""
    reasons: dict[Reason, ReasonTotal]
    ttft: dict[HitClass, TtftTotal]
    """`miss`: nothing was cached; `full`: all that can be; `partial`."""


class CacheState(CacheFacts):
    """The answer of `GET /v1/cache` to an operator."""

    blocks: Blocks
    capacity_tokens: int
    models: list[ModelFacts]
    departures: dict[Cause, int]
    """Blocks that have left the cache so far, by cause."""
    totals: TotalsReply
    requests: Requests
    settings: dict[str, dict[str, Setting]]
    """All settings by section; `effective` holds what `auto` became."""
    tenants: list[Tenant] | None = None
    """All tenants; null on a server without keys."""


class Health(Reply):
    """Whether the engine lives, or takes requests."""

    status: Literal["ok", "not_ready", "engine_dead"]


class Index(Reply):
    """What there is to call."""

    name: Literal["foreword"] = "foreword"
    model: str
    routes: list[str]
    """Method and path of each."""
    described: str = "/openapi.json"


async def get_index(request: Request) -> Index:
    """The routes by name."""
    routes = [f"{method} {route.path}" for route in routes_of(request) for method in sorted(route.methods or ())]
    return Index(model=service_of(request).models[0], routes=routes)


async def get_health(request: Request) -> Response:
    """200 while the engine thread is alive, else 503."""
    return _health("ok" if service_of(request).engine.alive else "engine_dead")


async def get_ready(request: Request) -> Response:
    """200 while requests are taken, else 503."""
    service = service_of(request)
    if _is_ready(service):
        return _health("ok")
    return _health("not_ready" if service.engine.alive else "engine_dead")


def _is_ready(service: Service) -> bool:
    return service.engine.ready and service.warmed()


async def get_metrics(request: Request) -> Response:
    """Prometheus metrics."""
    service = service_of(request)
    spans, tokens = service.keeper.waste()
    page = service.metrics.render(
        service.engine.state(), ready=_is_ready(service), volatile_spans=spans, volatile_tokens=tokens
    )
    return Response(page, media_type=CONTENT_TYPE)


async def get_cache(request: Request, tenant: str | None = None) -> CacheState | TenantCache:
    """The cache at this moment: to an operator the whole of it, to a tenant its own part."""
    service, who = service_of(request), principal(request)
    state = service.engine.state()
    facts = {
        "model": service.models[0],
        "enabled": state.caching,
        "cacheable": service.not_cacheable is None,
        "not_cacheable": service.not_cacheable,
        "block_size": service.limits.block_size,
    }
    if tenant is None and who.admin:
        return _whole(service, state, facts)
    name = whose(request, service.keys, who.tenant.name if tenant is None else tenant).name
    facts["enabled"] = state.caching and state.tenants.get(name, TenantState()).caching
    return TenantCache(**facts, **_tenant(name, service, state).model_dump())


def _whole(service: Service, state: EngineState, facts: dict[str, Any]) -> CacheState:
    pool = state.pool
    names = None if service.keys is None else sorted(service.keys.keys.tenants)
    return CacheState.model_validate(
        {
            **facts,
            "blocks": Blocks(
                capacity=pool.total,
                free=pool.free,
                cached=pool.cached,
                held=pool.held,
                pinned=sum(state.pinned.values()),
                pin_budget=int(service.config.cache.pin_budget * pool.total),
            ),
            "models": [
                ModelFacts(
                    id=service.models[0],
                    cacheable=service.not_cacheable is None,
                    not_cacheable=service.not_cacheable,
                    namespace=str(service.effective()["root"]),
                )
            ],
            "departures": dict(state.departures),
            "totals": _totals(service),
            "capacity_tokens": pool.total * service.limits.block_size,
            "requests": Requests(waiting=state.waiting, running=state.running),
            "settings": {**asdict(service.config), "effective": dict(service.effective())},
            "tenants": None if names is None else [_tenant(name, service, state) for name in names],
        }
    )


def _totals(service: Service) -> TotalsReply:
    totals = service.metrics.totals()
    return TotalsReply(
        prompt_tokens=TokensReply(cached=totals.prompt_tokens.cached, computed=totals.prompt_tokens.computed),
        saved_seconds=totals.saved_s,
        reasons={name: ReasonTotal(requests=num, tokens=tokens) for name, (num, tokens) in totals.reasons.items()},
        ttft={hit: TtftTotal(requests=num, seconds=seconds) for hit, (num, seconds) in totals.ttft.items()},
    )


def _tenant(name: str, service: Service, state: EngineState) -> Tenant:
    its = state.tenants.get(name, TenantState())
    tokens = service.metrics.prompt_tokens_of(name)
    limit = service.keys.keys.tenants[name].max_requests if service.keys is not None else 0
    return Tenant(
        tenant=name,
        prompt_tokens=TokensReply(cached=tokens.cached, computed=tokens.computed),
        blocks=TenantBlocks(
            share=service.limits.shares.get(name, 0),
            cached=its.cached,
            held=its.held,
            pinned=state.pinned.get(name, 0),
        ),
        requests=TenantRequests(waiting=its.waiting, running=its.running, limit=limit),
        max_context=service.limits.of(name).max_context,
    )


def _health(status: Literal["ok", "not_ready", "engine_dead"]) -> Response:
    return JSONResponse(Health(status=status).model_dump(), 200 if status == "ok" else 503)
