"""The engine in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foreword.cache.blocks import PoolState
from foreword.cache.departed import Cause


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
    """By name; whoever has nothing here and asks for nothing is missing."""
