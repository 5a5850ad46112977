"""Fault: a contradiction in the books, whom it is about, and what a person needs to find its cause."""

from dataclasses import dataclass

from foreword.base.ids import BlockId
from foreword.cache.identity import ALONE, PUBLIC


@dataclass(frozen=True, slots=True)
class Doubt:
    """A block whose holders are not those that the leases say."""

    block: BlockId
    holders: int
    """As the pool counts."""
    leases: int
    """As many leases hold it."""
    owner: str
    """The tenant whose block it is, or "public"; empty on a server that serves one tenant only."""
    hash: str | None
    """The beginning of its hash; None for a block that is not published."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The first contradiction that a check found."""

    what: str
    doubts: tuple[Doubt, ...] = ()

    @property
    def tenants(self) -> frozenset[str] | None:
        """Whom it is about. None: everybody, since no block is named, or one that all share."""
        owners = frozenset(doubt.owner for doubt in self.doubts)
        return owners if owners and not owners & {ALONE.name, PUBLIC} else None
