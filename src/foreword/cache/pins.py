"""Pins: prefixes that are evicted last, by name; within a budget that is a part of the pool, and of each owner's share.

A pin is a statement about a prefix, not about blocks: what of it is evicted after all (when a request that runs needs
the room and there is nothing else), or was never computed, is pinned once it is published. Forgetting a prefix on
purpose forgets its pins.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreword.base.ids import BlockHash
from foreword.cache.expiry import NEVER


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix: the hashes of its blocks that are `owner`'s."""

    owner: str
    hashes: tuple[BlockHash, ...]
    until_s: float = NEVER
    """When it ends by itself, on the engine's clock."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What asking for a pin came to, in blocks."""

    done: bool
    """False: it would have been over the budget, and nothing has changed."""
    num_blocks: int
    """Of the prefix."""
    num_cached: int
    """Of those: findable now. The rest is pinned when it is computed."""
    num_pinned: int
    """Of all pins of this owner, without this one when it was refused."""
    budget: int
    """How many those may be."""


class Pins:
    """Which hashes are pinned, and by how many pins."""

    __slots__ = ("_counts", "_pins", "_until_s")

    def __init__(self) -> None:
        self._pins: dict[BlockHash, Pin] = {}
        # By the hash of the last block.
        self._counts: dict[str, Counter[BlockHash]] = {}
        self._until_s = NEVER

    def __iter__(self) -> Iterator[Pin]:
        return iter(tuple(self._pins.values()))

    def has(self, name: BlockHash, owner: str) -> bool:
        """Whether a block of this owner is part of a pinned prefix."""
        counts = self._counts.get(owner)
        return counts is not None and name in counts

    def num_blocks(self, owner: str | None = None) -> int:
        """Blocks of all pins of an owner, or of all; what two of them begin with counts once."""
        if owner is None:
            return sum(map(len, self._counts.values()))
        return len(self._counts.get(owner, ()))

    def owners(self) -> dict[str, int]:
        """Pinned blocks of each owner. Safe to call from any thread (it may be a moment old)."""
        return {owner: len(counts) for owner, counts in tuple(self._counts.items())}

    def num_new(self, owner: str, hashes: Sequence[BlockHash]) -> int:
        """How many of these are not pinned yet."""
        return sum(not self.has(name, owner) for name in hashes)

    def add(self, pin: Pin) -> None:
        """Pin a prefix; an earlier pin of the same prefix is replaced."""
        last = pin.hashes[-1]
        if last not in self._pins:
            self._counts.setdefault(pin.owner, Counter()).update(pin.hashes)
        self._pins[last] = pin
        self._until_s = min(self._until_s, pin.until_s)

    def remove(self, last: BlockHash) -> list[BlockHash] | None:
        """End the pin of the prefix with this last block: hashes that nothing pins now, tail first; None: no pin."""
        pin = self._pins.pop(last, None)
        if pin is None:
            return None
        counts = self._counts[pin.owner]
        counts.subtract(pin.hashes)
        free = [name for name in reversed(pin.hashes) if not counts[name]]
        for name in free:
            del counts[name]
        if not counts:
            del self._counts[pin.owner]
        return free

    def lapsed(self, now: float) -> list[BlockHash]:
        """Last blocks of pins whose time is up. O(1) while there are none."""
        if now < self._until_s:
            return []
        over = [last for last, pin in self._pins.items() if pin.until_s <= now]
        self._until_s = min((pin.until_s for pin in self._pins.values() if pin.until_s > now), default=NEVER)
        return over

    def concerned(self, names: set[BlockHash]) -> list[BlockHash]:
        """Last blocks of pins that have any of these."""
        return [last for last, pin in self._pins.items() if not names.isdisjoint(pin.hashes)]
