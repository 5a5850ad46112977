"""What the server stands on, handed to it once and never looked up anywhere else."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request

from foreword.assemble import Assembly
from foreword.base.config import Config
from foreword.base.ids import BlockHash
from foreword.cache.explain import Explanation
from foreword.cache.identity import Tenant
from foreword.cache.pins import Pinned
from foreword.cache.prefix_cache import Flushed
from foreword.cache.view import Order
from foreword.engine.state import EngineState, LiveRequest
from foreword.front.advice import Advice
from foreword.front.ask import Ask, Caller, Piece
from foreword.front.keeper import Finding, Prefix, Sight
from foreword.front.operator import Head, PublicHead
from foreword.front.where import Where
from foreword.schedule.admission import Limits
from foreword.server.auth import KeyFile
from foreword.telemetry import Metrics

Setting = str | int | float | bool | None
"""A resolved setting's value."""


class Answer(Protocol):
    """One answer on its way; `front.answer.Answer` is one."""

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces in order; the last one carries `finish` and `usage`."""
        ...

    def cancel(self) -> None:
        """Stop within a step. Harmless after the end."""
        ...

    def where(self, explanation: Explanation, /) -> Where | None:
        """Where in the request its match ended; may take milliseconds."""
        ...

    def advice(self) -> Advice | None:
        """After the end: what to change in the prompt, if its match ended where many do. May take milliseconds."""
        ...


class Front(Protocol):
    """Text in, text out; `front.front.Front` is one. It may take long: never call it on the event loop."""

    def submit(self, ask: Ask, caller: Caller, /) -> Answer:
        """Check, tokenise and queue one prompt. Raises RequestError and CapacityError."""
        ...


class Engine(Protocol):
    """Whether somebody computes, and how busy they are; `engine.worker.Worker` is one."""

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        ...

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        ...

    def now(self) -> float:
        """The clock of `Caller.arrived_s`."""
        ...

    def state(self) -> EngineState:
        """Numbers of this moment, from any thread."""
        ...

    def live(self, tenant: str | None, limit: int, /) -> tuple[tuple[LiveRequest, ...], int]:
        """The oldest requests of a tenant or of all, and how many there are, from any thread."""
        ...


class Operator(Protocol):
    """What operators do to the running model; `front.operator.Operator` is one. All of it may take long."""

    @property
    def heads(self) -> Sequence[PublicHead]:
        """What all tenants share."""
        ...

    @property
    def num_public_blocks(self) -> int:
        """Blocks of all heads together."""
        ...

    @property
    def max_public_blocks(self) -> int:
        """How many they may be."""
        ...

    def mark(self, head: Head, /) -> PublicHead:
        """Let all tenants share a head. Raises RequestError."""
        ...

    def unmark(self, head: Head, /) -> int:
        """Share it no longer: how many blocks were dropped. Raises NotFound."""
        ...

    def reload(self) -> BlockHash:
        """Load the weights again; the new root. Raises what loading raises."""
        ...


class Keeper(Protocol):
    """Verbs over the cache; `front.keeper.Keeper` is one. All of it may take long."""

    def lookup(self, ask: Ask, caller: Caller, /) -> Finding:
        """What a request would find, and why no more. Raises RequestError."""
        ...

    def warm(self, ask: Ask, caller: Caller, /) -> Answer:
        """Compute a prompt and store it. Raises RequestError and CapacityError."""
        ...

    def pin(self, prefix: Prefix, tenant: Tenant, ttl_s: float | None, /) -> Pinned:
        """Let a prefix be evicted last. Raises RequestError and NotFound."""
        ...

    def unpin(self, prefix: Prefix, tenant: Tenant, /) -> int:
        """No longer. Raises RequestError and NotFound."""
        ...

    def flush(self, prefix: Prefix | None, tenant: Tenant | None, /) -> Flushed:
        """Forget a prefix, or all of a tenant, or everything. Raises RequestError and NotFound."""
        ...

    def tree(
        self, tenant: Tenant | None, start: BlockHash | None, limit: int, order: Order, /
    ) -> tuple[tuple[Sight, ...], bool]:
        """The tree from the top down, and whether there is more. Raises NotFound."""
        ...

    def advice(self, tenant: Tenant | None, /) -> tuple[tuple[str, Advice], ...]:
        """What keeps ending the matches of a tenant, or of all, each with its owner's name."""
        ...

    def waste(self) -> tuple[int, int]:
        """How many such spans there are, and the tokens that they cost in the last hour. Takes microseconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model being served."""

    front: Front
    engine: Engine
    operator: Operator
    keeper: Keeper
    metrics: Metrics
    prefill_flops: Callable[[int], int]
    """Estimate of what it takes to compute so many leading tokens of a prompt."""
    limits: Limits
    models: tuple[str, ...]
    """Names the model answers to; the first one is the one that answers carry."""
    config: Config
    effective: Callable[[], Mapping[str, Setting]]
    """What the settings have become (every `auto` resolved), for `GET /v1/cache`."""
    not_cacheable: str | None = None
    """Why prefixes of this model cannot be reused; None where they can."""
    keys: KeyFile | None = None
    """Who may come in. None: everybody, as one tenant."""
    warmed: Callable[[], bool] = lambda: True
    """Whether the prompts of `--warm` are computed."""


def serving(
    assembly: Assembly, metrics: Metrics, keys: KeyFile | None = None, warmed: Callable[[], bool] = lambda: True
) -> Service:
    """The service of an assembled model; `metrics` is the observer that it was assembled with."""
    name, asked = assembly.card.name, assembly.config.model.model
    return Service(
        front=assembly.front,
        engine=assembly.worker,
        operator=assembly.operator,
        keeper=assembly.keeper,
        metrics=metrics,
        prefill_flops=assembly.prefill_flops,
        limits=assembly.limits,
        models=(name,) if asked is None or asked == name else (name, asked),
        config=assembly.config,
        effective=lambda: assembly.effective,
        not_cacheable=assembly.card.not_cacheable,
        keys=keys,
        warmed=warmed,
    )


def service_of(request: Request) -> Service:
    """The service that the request's app was made with."""
    return request.app.state.service
