"""Caches too simple to be wrong: one knows all prefixes ever computed, one what is kept and in what order it goes."""

from collections.abc import Sequence
from dataclasses import dataclass

Prefix = tuple[int, ...]


class NaiveCache:
    """Remembers prefixes as tuples, never evicts. A real cache never finds more than this one knows."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: set[tuple[bytes, tuple[int, ...]]] = set()

    def publish(self, world: bytes, tokens: Sequence[int]) -> None:
        """These tokens were computed in this world (tenant, model, ...), all of them."""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            self._known.add((world, tuple(tokens[:end])))

    def match(self, world: bytes, tokens: Sequence[int], read_tokens: int | None = None) -> int:
        """Leading tokens that some known full-block prefix begins with as well; never the last token."""
        limit = len(tokens) - 1 if read_tokens is None else min(len(tokens) - 1, read_tokens)
        best = 0
        for where, known in self._known:
            common = 0
            while where == world and common < min(limit, len(known)) and known[common] == tokens[common]:
                common += 1
            best = max(best, common)
        return best

    def forget(self, world: bytes | None = None, start: Sequence[int] = ()) -> None:
        """Flush: everything, or what one world knows, or of that only what begins like this."""
        if world is None:
            self._known.clear()
        self._known = {(w, known) for w, known in self._known if w != world or known[: len(start)] != tuple(start)}


@dataclass(slots=True)
class Entry:
    """One stored block, by the whole prefix that it ends."""

    rank: int
    ttl_s: float
    last_s: float
    turn: int
    """Grows with every use: the smallest of the lowest rank is evicted first, among those that nobody came back to."""
    proven: bool = False
    """Somebody came back to it."""


class NaiveKeeper:
    """One request at a time: what a cache of `num_blocks` keeps, in what order it goes, and how what is gone went."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.entries: dict[Prefix, Entry] = {}
        self.gone: dict[Prefix, str] = {}
        self.unstored: set[Prefix] = set()
        self.pins: set[Prefix] = set()
        self.now = 0.0
        self._turn = 0

    def advance(self, now: float) -> None:
        """What has not been used for its time goes, unless it is pinned."""
        self.now = now
        for prefix in [p for p, e in self.entries.items() if e.last_s + e.ttl_s <= now and p not in self.pins]:
            self.drop(prefix, "expired")

    def drop(self, prefix: Prefix, cause: str) -> None:
        """One block leaves."""
        del self.entries[prefix]
        self.gone[prefix] = cause

    def blocks(self, tokens: Prefix) -> list[Prefix]:
        """The full blocks of a prompt, by the prefixes that they end."""
        return [tokens[:end] for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def match(self, tokens: Prefix, limit: int) -> tuple[list[Prefix], int]:
        """The full blocks that a lookup finds, and how many tokens it covers with the tail of another one."""
        found = list[Prefix]()
        while len(found) < limit // self.block_size and (step := self.blocks(tokens)[len(found)]) in self.entries:
            found.append(step)
        start = len(found) * self.block_size
        tails = [shared_tokens(prefix[start:], tokens[start:limit]) for prefix in self.children(tokens[:start])]
        return found, start + max(tails, default=0)

    def children(self, prefix: Prefix) -> list[Prefix]:
        """Stored blocks that continue this one."""
        return [p for p in self.entries if len(p) == len(prefix) + self.block_size and p[: len(prefix)] == prefix]

    def room(self, need: int, held: list[Prefix]) -> bool:
        """Evict until `need` blocks are free: leaves that nobody holds, pinned ones last. False: that cannot be."""
        free = self.num_blocks - len(self.entries)
        if need > free + sum(prefix not in held for prefix in self.entries):
            return False
        while free < need:
            leaves = [p for p in self.entries if p not in held and not self.children(p)]
            self._age(held)
            self.drop(min(leaves, key=self._worth), "evicted")
            self._age(held)
            free += 1
        return True

    def _age(self, held: list[Prefix]) -> None:
        """Of the cheapest rank no more may be proven than three quarters of all; the rest is new again."""
        loose = {p: e for p, e in self.entries.items() if p not in held and p not in self.pins}
        lowest = min((e.rank for e in loose.values()), default=0)
        proven = sorted((e for e in loose.values() if e.proven and e.rank == lowest), key=lambda e: e.turn)
        for entry in proven[: max(0, len(proven) - len(self.entries) * 3 // 4)]:
            self._turn += 1
            entry.proven, entry.turn = False, self._turn

    def use(self, held: list[Prefix]) -> None:
        """These are let go in this order."""
        for prefix in held:
            self._turn += 1
            self.entries[prefix].last_s, self.entries[prefix].turn = self.now, self._turn

    def store(self, prefix: Prefix, rank: int, ttl_s: float) -> None:
        """Publish a block, or what is published already once more."""
        if prefix not in self.entries:
            self.entries[prefix] = Entry(rank, ttl_s, self.now, 0)
        self.raise_(self.blocks(prefix), rank, ttl_s)

    def raise_(self, prefixes: list[Prefix], rank: int, ttl_s: float) -> None:
        """Keep these at least so dearly and so long."""
        for prefix in prefixes:
            entry = self.entries[prefix]
            entry.rank, entry.ttl_s = max(entry.rank, rank), max(entry.ttl_s, ttl_s)

    def _worth(self, prefix: Prefix) -> tuple[bool, int, bool, int]:
        entry, pinned = self.entries[prefix], prefix in self.pins
        return pinned, 0 if pinned else entry.rank, not pinned and entry.proven, entry.turn


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two runs have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
