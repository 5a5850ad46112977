"""Generations: which running requests may go on publishing after something was forgotten.

Everything that makes the cache forget (a flush, a block that an audit found wrong, a head that is public no longer)
raises the generation and says whom it concerns. A lease carries the generation that it was made in: it publishes
nothing more once anything since then concerned its chain.
"""

from collections import deque
from dataclasses import dataclass

from foreword.base.ids import BlockHash
from foreword.cache.identity import Chain

_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Below:
    """One block and all that continues it."""

    name: BlockHash
    block: int
    """Its number in every chain that has it."""


Scope = Below | str | None
"""What is forgotten: a block with all that continues it, all of one tenant, or everything."""


class Generations:
    """Counts what was forgotten, and remembers the last few scopes."""

    __slots__ = ("_scopes", "current")

    def __init__(self) -> None:
        self.current = 0
        self._scopes: deque[Scope] = deque(maxlen=_REMEMBERED)

    def advance(self, scope: Scope) -> None:
        """Something was forgotten."""
        self.current += 1
        self._scopes.append(scope)

    def concerns(self, chain: Chain, generation: int) -> bool:
        """Whether anything that was forgotten since `generation` concerns this chain; yes when that is too long ago."""
        missed = self.current - generation
        if missed > len(self._scopes):
            return True
        return any(_concerns(self._scopes[-i], chain) for i in range(1, missed + 1))


def _concerns(scope: Scope, chain: Chain) -> bool:
    if isinstance(scope, Below):
        return scope.block < len(chain.hashes) and chain.hashes[scope.block] == scope.name
    return scope is None or scope == chain.tenant.name
