"""BlockPool: who holds each block of device memory, and which block is handed out or given up next.

A block's state is two facts, held or not and hashed or not:

              no hash     hash
    held      private     shared    (shared: read-only)
    unheld    free        cached    (cached: may be evicted)

    free + cached + held == num_blocks, always.

Writable means exactly one holder and no hash; that is the whole copy-on-write rule.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, BlockId
from foreword.cache.expiry import NEVER, Expiry

PINNED = 101
"""The rank of pinned blocks: above every priority."""

_PINS = 2 * PINNED
_MOST_PROVEN = 3, 4

Line = OrderedDict[BlockId, float]
"""Unheld blocks of one owner, equally dear, in the order in which they were let go, each with that moment."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool in numbers of blocks; `free + cached + held == total`."""

    total: int
    free: int
    cached: int
    held: int


@dataclass(frozen=True, slots=True)
class Worth:
    """How long and how dearly a block is kept, every default filled in."""

    rank: int
    """Lower ones are evicted first."""
    ttl_s: float
    """Seconds after its last use for which it can be found; `NEVER` has no end."""


class Shelf:
    """One owner's published blocks; the unheld ones in lines: two for each rank, new ones and proven ones.

    A block is *proven* once a later request has matched it. A burst of prompts that come only once then evicts its own
    blocks, and not those that are asked for again and again.
    """

    __slots__ = ("lines", "num_published", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.lines: dict[int, Line] = {}
        """The cheapest first."""
        self.num_published = 0
        """Held ones included."""

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds."""
        total = 0
        for line in self.lines.values():
            total += len(line)
        return total

    @property
    def has_unpinned(self) -> bool:
        """Whether nobody holds some block that is not pinned."""
        for place, line in self.lines.items():
            if line:
                return place != _PINS
        return False

    @property
    def pins(self) -> Line | None:
        """The pinned ones."""
        return self.lines.get(_PINS)

    def line(self, rank: int, *, proven: bool = False) -> Line:
        """The line of this rank, made if need be; of pinned blocks there is one."""
        place = _PINS if rank == PINNED else 2 * rank + proven
        line = self.lines.get(place)
        if line is None:
            line = Line()
            self.lines = dict(sorted({**self.lines, place: line}.items()))
        return line

    def outdated(self) -> tuple[Line, Line, int] | None:
        """Where proven blocks of the lowest rank stand, where new ones do, and how many too many are proven, if any."""
        place = next((place for place, line in self.lines.items() if line), _PINS)
        if place == _PINS:
            return None
        proven, (most, of) = self.line(place // 2, proven=True), _MOST_PROVEN
        surplus = len(proven) - self.num_published * most // of
        return (proven, self.line(place // 2), surplus) if surplus > 0 else None

    def order(self) -> list[BlockId]:
        """The unheld blocks, the next to be evicted first."""
        return [block for line in self.lines.values() for block in line]

    @property
    def num_alike(self) -> int:
        """Unheld blocks of the cheapest line that has any."""
        return next((len(line) for line in self.lines.values() if line), 0)

    def first(self, num: int) -> list[BlockId]:
        """The next `num` to be evicted, at most `num_alike`: each before the one that it continues."""
        return list(islice(next((line for line in self.lines.values() if line), ()), num))


class BlockPool:
    """Counts holders, keeps hashes, and lines up unheld hashed blocks by rank, proof and when they were last let go.

    The order of a shelf is its eviction order. Whoever releases a prefix releases its tail first, and a block never has
    a lower rank, less proof or a shorter time than one that continues it (`raise_`, `count_hits`); so an owner's first
    block is always a leaf.
    """

    __slots__ = (
        "_expiry",
        "_free",
        "_hashes",
        "_holders",
        "_line_of",
        "_owners",
        "_proven",
        "_shelf_of",
        "_shelves",
        "_worths",
        "hits",
        "now",
        "num_blocks",
        "num_cached",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._owners = [""] * num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._shelves: dict[str, Shelf] = {}
        self._shelf_of: list[Shelf | None] = [None] * num_blocks
        self._line_of: list[Line | None] = [None] * num_blocks
        # Where a published block stands while nobody holds it.
        self._worths: list[Worth] = [Worth(0, NEVER)] * num_blocks
        self._proven = [False] * num_blocks
        self._expiry = Expiry()
        self.hits = [0] * num_blocks
        """How often each published block was matched."""
        self.num_cached = 0
        self.now = 0.0
        """The moment of whatever happens next."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and nobody can find."""
        return len(self._free)

    @property
    def shelves(self) -> Mapping[str, "Shelf"]:
        """What each owner has in the pool."""
        return self._shelves

    def state(self) -> PoolState:
        """The pool in numbers. Safe to call from any thread (it may be a moment old)."""
        free, cached = len(self._free), self.num_cached
        return PoolState(self.num_blocks, free, cached, self.num_blocks - free - cached)

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The hash under which the block is published, if it is."""
        return self._hashes[block]

    def owner_of(self, block: BlockId) -> str:
        """Whose a held or cached block is: the tenant that took it, until a hash gives it to another owner."""
        return self._owners[block]

    def worth_of(self, block: BlockId) -> Worth:
        """How a published block is kept; its rank does not say whether it is pinned."""
        return self._worths[block]

    def last_used(self, block: BlockId) -> float:
        """When a published block was last let go; now, while somebody holds it."""
        line = self._line_of[block]
        return self.now if line is None else line.get(block, self.now)

    def last_uses(self, blocks: Sequence[BlockId]) -> list[float]:
        """The same of many."""
        line_of, now = self._line_of, self.now
        return [now if (line := line_of[block]) is None else line.get(block, now) for block in blocks]

    def hits_of(self, blocks: Sequence[BlockId]) -> list[float]:
        """How often each of these was matched."""
        hits = self.hits
        return [hits[block] for block in blocks]

    def num_like(self, blocks: Sequence[BlockId], owner: str, pinned: bool, hits: int | None) -> int:
        """How many of these, from the first one on, have this owner, are pinned or not, and have these hits, if any."""
        shelf = self._shelves.get(owner)
        pins = None if shelf is None else shelf.pins
        owners, line_of, counts = self._owners, self._line_of, self.hits
        for number, block in enumerate(blocks):
            line = line_of[block]
            is_pinned = line is not None and line is pins
            if owners[block] != owner or is_pinned is not pinned or (hits is not None and counts[block] != hits):
                return number
        return len(blocks)

    def is_held(self, block: BlockId) -> bool:
        """Whether anybody holds it."""
        return self._holders[block] > 0

    def is_pinned(self, block: BlockId) -> bool:
        """Whether a published block is evicted last."""
        shelf = self._shelf_of[block]
        return shelf is not None and self._line_of[block] is shelf.pins

    def is_writable(self, block: BlockId) -> bool:
        """Whether its holder may write into it: exactly one holder and no hash."""
        return self._holders[block] == 1 and self._hashes[block] is None

    def take(self, tenant: str) -> BlockId | None:
        """Hand out a free block, held once; None if there is none (evict first)."""
        if not self._free:
            return None
        block = self._free.pop()
        self._holders[block] = 1
        self._owners[block] = tenant
        return block

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Add one holder to each of these shared or cached blocks."""
        holders, line_of = self._holders, self._line_of
        for block in blocks:
            if not holders[block]:
                line = line_of[block]
                if line is None:
                    raise InvariantBroken(f"block {block} is to be shared but has no hash")
                del line[block]
                self.num_cached -= 1
            holders[block] += 1

    def count_hits(self, blocks: Sequence[BlockId]) -> None:
        """These published blocks, a prefix that is held, were matched."""
        hits, proven = self.hits, self._proven
        for block in blocks:
            hits[block] += 1
            if not proven[block]:
                proven[block] = True
                if not self.is_pinned(block):
                    self._stand(block, self._worths[block].rank)

    def age(self, shelf: Shelf) -> None:
        """Where too much of a shelf is proven, what was used longest ago must prove itself again; tails do so first."""
        outdated = shelf.outdated()
        if outdated is not None:
            proven, new, surplus = outdated
            for block in tuple(islice(proven, surplus)):
                new[block] = proven.pop(block)
                self._line_of[block], self._proven[block] = new, False

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Take one holder away from each, in this order; the last one leaves a block cached if hashed, else free."""
        holders, line_of, now, free = self._holders, self._line_of, self.now, self._free
        for block in blocks:
            left = holders[block] - 1
            if left < 0:
                raise InvariantBroken(f"block {block} was released more often than it was held")
            holders[block] = left
            if left == 0:
                line = line_of[block]
                if line is None:
                    free.append(block)
                    continue
                line[block] = now
                self.num_cached += 1
                if self._worths[block].ttl_s != NEVER:
                    self._expiry.watch(block, now + self._worths[block].ttl_s)

    def label(self, block: BlockId, name: BlockHash, owner: str, worth: Worth) -> None:
        """Give a held block its hash: from now on it is read-only. `owner` answers for its memory."""
        if not self.is_writable(block):
            raise InvariantBroken(f"block {block} is to be published but is not private to one holder")
        self._hashes[block] = name
        self._owners[block] = owner
        shelf = self._shelves.get(owner)
        if shelf is None:
            shelf = self._shelves[owner] = Shelf(owner)
        shelf.num_published += 1
        self._shelf_of[block] = shelf
        self._line_of[block] = shelf.line(worth.rank)
        self._worths[block] = worth
        self._proven[block] = False
        self.hits[block] = 0

    def unlabel(self, block: BlockId) -> None:
        """Take the hash away; an unheld block becomes free."""
        shelf, line = self._shelf_of[block], self._line_of[block]
        if shelf is None or line is None:
            raise InvariantBroken(f"block {block} is to lose a hash that it does not have")
        self._hashes[block] = self._shelf_of[block] = self._line_of[block] = None
        shelf.num_published -= 1
        if not self._holders[block]:
            del line[block]
            self.num_cached -= 1
            self._free.append(block)

    def raise_(self, block: BlockId, worth: Worth) -> bool:
        """Keep a held block at least so long and so dearly; False if it was already, and so are all before it."""
        before = self._worths[block]
        if before.rank >= worth.rank and before.ttl_s >= worth.ttl_s:
            return False
        self._worths[block] = Worth(max(before.rank, worth.rank), max(before.ttl_s, worth.ttl_s))
        if not self.is_pinned(block):
            self._stand(block, self._worths[block].rank)
        return True

    def pin(self, block: BlockId, *, pinned: bool) -> None:
        """Let a published block be evicted last, or in its turn again; it counts as used now.

        A prefix must be pinned tail first and whole, and unpinned tail first.
        """
        self._stand(block, PINNED if pinned else self._worths[block].rank)
        if not pinned and not self._holders[block] and self._worths[block].ttl_s != NEVER:
            self._expiry.watch(block, self.now + self._worths[block].ttl_s)

    def pop_expired(self) -> tuple[BlockId, float] | None:
        """A cached block whose time is up, and the moment when it was; None if there is none."""
        while (block := self._expiry.pop(self.now)) is not None:
            line = self._line_of[block]
            if line is None or block not in line:
                continue  # it is watched again when it is let go
            moment = line[block] + self._worths[block].ttl_s
            if self.is_pinned(block):
                continue  # it is watched again when it is pinned no longer
            if moment <= self.now:
                return block, moment
            self._expiry.watch(block, moment)
        return None

    def holders(self) -> tuple[int, ...]:
        """Number of holders of every block, for checks."""
        return tuple(self._holders)

    def _stand(self, block: BlockId, rank: int) -> None:
        """From now on the block's place is the end of the line of this rank."""
        shelf, old = self._shelf_of[block], self._line_of[block]
        if shelf is None or old is None:
            raise InvariantBroken(f"block {block} is to be kept but has no hash")
        line = self._line_of[block] = shelf.line(rank, proven=self._proven[block])
        if not self._holders[block]:
            del old[block]
            line[block] = self.now
