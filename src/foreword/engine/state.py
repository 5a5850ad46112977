"""The engine in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from foreword.base.ids import RequestId
from foreword.cache.blocks import PoolState
from foreword.cache.departed import Cause
from foreword.schedule.request import Request, Submission

Phase = Literal["waiting", "prefill", "decode"]
"""What a request is at: it holds nothing; its prompt is computed; tokens of its answer are."""


@dataclass(frozen=True, slots=True)
class TenantState:
    """One tenant at one moment: nothing but its own."""

    waiting: int = 0
    """Requests that hold nothing."""
    running: int = 0
    """Requests that hold blocks."""
    cached: int = 0
    """Blocks that it has in the cache and nobody holds."""
    held: int = 0
    """Blocks that its requests hold."""
    caching: bool = True
    """Whether its prefixes are reused: no fault in its books has stopped that."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine at one moment."""

    alive: bool
    waiting: int
    """Requests that hold nothing: in the inbox or in the scheduler's queue."""
    running: int
    """Requests that hold blocks."""
    pool: PoolState
    caching: bool = True
    """Whether prefixes are reused: the setting, and that no fault in the books has stopped it for everybody."""
    pinned: Mapping[str, int] = field(default_factory=dict[str, int])
    """Pinned blocks by owner."""
    departures: Mapping[Cause, int] = field(default_factory=dict[Cause, int])
    """Blocks that have left so far, by cause."""
    tenants: Mapping[str, TenantState] = field(default_factory=dict[str, TenantState])
    """By name; whoever has nothing here and asks for nothing is missing, unless reuse has stopped for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request that is not over, at one moment."""

    id: RequestId
    tenant: str
    key: str
    """The caller's own label."""
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the cache."""
    computed_tokens: int
    """Prompt tokens computed so far."""
    completion_tokens: int
    """Tokens generated so far."""
    age_s: float
    """Since it came in."""


def live_request(asked: Submission, request: Request | None, now: float) -> LiveRequest:
    """What is known of a request; None: it has not reached the scheduler yet. From any thread, a moment old."""
    prompt = len(asked.chain) if request is None else request.num_prompt
    phase: Phase = "waiting"
    if request is not None and request.lease is not None:
        phase = "prefill" if request.first_token_s is None else "decode"
    cached = 0 if request is None else request.cached
    return LiveRequest(
        id=asked.id,
        tenant=asked.chain.tenant.name,
        key=asked.key,
        phase=phase,
        prompt_tokens=prompt,
        cached_tokens=cached,
        computed_tokens=0 if request is None else max(0, min(request.accounted, prompt) - cached),
        completion_tokens=0 if request is None else request.num_generated,
        age_s=max(0.0, now - asked.arrival_s),
    )
