"""What the server says about itself: `GET /health`, `/ready`, `/metrics` and `/v1/cache`."""

from dataclasses import asdict
from typing import Literal

from fastapi import Request
from starlette.responses import JSONResponse, Response

from foreword.server.service import Setting, service_of
from foreword.server.wire import Reply
from foreword.telemetry.metrics import CONTENT_TYPE


class Blocks(Reply):
    """The device pool in blocks; `free + cached + held == capacity`."""

    capacity: int
    free: int
    cached: int
    held: int


class Requests(Reply):
    """Who is in the engine."""

    waiting: int
    running: int


class CacheState(Reply):
    """The answer of `GET /v1/cache`."""

    object: Literal["cache"] = "cache"
    model: str
    enabled: bool
    """Whether prefixes are reused: the setting, and that no fault has shut the cache."""
    cacheable: bool
    """Whether this model's prefixes can be."""
    block_size: int
    blocks: Blocks
    capacity_tokens: int
    requests: Requests
    settings: dict[str, dict[str, Setting]]
    """All settings by section; `effective` holds what `auto` became."""


class Health(Reply):
    """Whether the engine lives."""

    status: Literal["ok", "engine_dead"]


async def get_health(request: Request) -> Response:
    """200 while the engine thread is alive, else 503."""
    return _health(alive=service_of(request).engine.alive)


async def get_ready(request: Request) -> Response:
    """200 while requests are taken, else 503."""
    return _health(alive=service_of(request).engine.alive)


async def get_metrics(request: Request) -> Response:
    """Prometheus metrics."""
    service = service_of(request)
    return Response(service.metrics.render(service.engine.state()), media_type=CONTENT_TYPE)


async def get_cache(request: Request) -> CacheState:
    """The cache at this moment."""
    service = service_of(request)
    state, config = service.engine.state(), service.config
    pool = state.pool
    return CacheState(
        model=service.models[0],
        enabled=state.caching,
        cacheable=service.cacheable,
        block_size=config.cache.block_size,
        blocks=Blocks(capacity=pool.total, free=pool.free, cached=pool.cached, held=pool.held),
        capacity_tokens=pool.total * config.cache.block_size,
        requests=Requests(waiting=state.waiting, running=state.running),
        settings={**asdict(config), "effective": dict(service.effective)},
    )


def _health(*, alive: bool) -> Response:
    health = Health(status="ok" if alive else "engine_dead")
    return JSONResponse(health.model_dump(), 200 if alive else 503)
