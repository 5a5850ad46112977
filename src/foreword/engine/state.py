"""The engine in numbers."""

from dataclasses import dataclass

from foreword.cache.blocks import PoolState


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
    """Whether prefixes are reused: the setting, and that no broken book has shut the cache."""
