"""Books: what a person needs to find out how the books came to contradict themselves. No token, no text.

The heart makes it, the engine writes it into its log: one line of JSON.
"""

from collections.abc import Collection
from dataclasses import dataclass

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import FinishReason
from foreword.cache.blocks import PoolState
from foreword.cache.fault import Doubt
from foreword.cache.lease import Lease
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.request import Request


@dataclass(frozen=True, slots=True)
class Held:
    """What one lease holds."""

    blocks: tuple[BlockId, ...]
    shadows: tuple[BlockId, ...]
    """Published blocks of the same content as one of its own."""
    sources: tuple[BlockId, ...]
    """Blocks that a copy not yet committed reads."""
    published: int
    generation: int

    @classmethod
    def by(cls, lease: Lease) -> "Held":
        """Of a lease."""
        shadows = tuple(lease.shadows.values())
        return cls(lease.blocks, shadows, tuple(lease.sources), lease.published, lease.generation)


@dataclass(frozen=True, slots=True)
class Account:
    """One request, in tokens."""

    id: RequestId
    tenant: str
    prompt: int
    generated: int
    computed: int
    planned: int
    in_flight: int
    """Chunks in plans that are neither committed nor aborted."""
    finish: FinishReason | None
    held: Held | None


@dataclass(frozen=True, slots=True)
class Books:
    """All books at one moment."""

    what: str
    """What contradicts itself."""
    doubts: tuple[Doubt, ...]
    generation: int
    """Of the cache: how often it was flushed or a part of it quarantined."""
    pool: PoolState
    requests: tuple[Account, ...]


def books(what: str, cache: PrefixCache, requests: Collection[Request]) -> Books:
    """The books as a fault found them. O(blocks)."""
    accounts = tuple(
        Account(
            id=request.id,
            tenant=request.chain.tenant.name,
            prompt=request.num_prompt,
            generated=request.num_generated,
            computed=request.computed,
            planned=request.planned,
            in_flight=request.in_flight,
            finish=request.finish,
            held=None if request.lease is None else Held.by(request.lease),
        )
        for request in requests
    )
    doubts = cache.doubts(request.lease for request in requests if request.lease is not None)
    return Books(what, doubts, cache.generation, cache.state(), accounts)
