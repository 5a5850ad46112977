"""BlockPool: who holds each block of device memory, and which block is handed out or given up next.

A block's state is two facts, held or not and hashed or not:

              no hash     hash
    held      private     shared    (shared: read-only)
    unheld    free        cached    (cached: may be evicted)

    free + cached + held == num_blocks, always.

Writable means exactly one holder and no hash; that is the whole copy-on-write rule.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockId
from foreword.cache.expiry import NEVER, Expiry

PINNED = 101
"""The rank of pinned blocks: above every priority."""

_PINS = 2 * PINNED
_MOST_PROVEN = 3, 4

Rank = tuple[float, float]
"""Hits and last use of a block, `NEVER` while it is held; what an order goes by stands first."""


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


class Line(OrderedDict[BlockId, None]):
    """Unheld blocks of one owner, equally dear, in the order in which they were let go."""

    __slots__ = ("shelf",)

    def __init__(self, shelf: "Shelf") -> None:
        super().__init__()
        self.shelf = shelf


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
        """Blocks that nobody holds. Safe to call from any thread (it may be a moment old)."""
        total = 0
        for line in self.lines.values():  # a new line comes with a new dictionary
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
            line = Line(self)
            self.lines = dict(sorted({**self.lines, place: line}.items()))
        return line

    def outdated(self) -> tuple[Line, Line, int] | None:
        """Where proven blocks of the lowest rank stand, where new ones do, and how many too many are proven, if any."""
        most, of = _MOST_PROVEN
        for place, line in self.lines.items():
            if line:
                proven = None if place == _PINS else self.lines.get(place | 1)  # of the same rank
                surplus = 0 if proven is None else len(proven) - self.num_published * most // of
                return None if proven is None or surplus <= 0 else (proven, self.line(place // 2), surplus)
        return None

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
        "_holders",
        "_line_of",
        "_mortal",
        "_owners",
        "_proven",
        "_shelves",
        "_used",
        "_worths",
        "hits",
        "now",
        "num_blocks",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._owners = [""] * num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._shelves: dict[str, Shelf] = {}
        self._line_of: list[Line | None] = [None] * num_blocks
        # Where a block with a hash stands while nobody holds it; its hash is the index's to know.
        self._used = array("d", bytes(8 * num_blocks))
        # When such a block was last let go. Bare numbers side by side: a view of the tree compares many.
        self._worths: list[Worth] = [Worth(0, NEVER)] * num_blocks
        self._proven = [False] * num_blocks
        self._mortal = False
        # Whether any block was ever to be kept for some time only.
        self._expiry = Expiry()
        self.hits = [0] * num_blocks
        """How often each published block was matched."""
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
        free, cached = len(self._free), 0
        for shelf in tuple(self._shelves.values()):
            cached += shelf.num_cached
        return PoolState(self.num_blocks, free, cached, self.num_blocks - free - cached)

    def owner_of(self, block: BlockId) -> str:
        """Whose a held or cached block is: the tenant that took it, until a hash gives it to another owner."""
        return self._owners[block]

    def worth_of(self, block: BlockId) -> Worth:
        """How a published block is kept; its rank does not say whether it is pinned."""
        return self._worths[block]

    def last_used(self, block: BlockId) -> float:
        """When a published block was last let go; now, while somebody holds it."""
        return self.now if self._holders[block] else self._used[block]

    def of_owner(self, blocks: Sequence[BlockId], owner: str) -> list[BlockId]:
        """Those of these that are this owner's."""
        owners = self._owners
        return [block for block in blocks if owners[block] == owner]

    def hit_more(self, blocks: Sequence[BlockId], than: Rank) -> list[tuple[Rank, BlockId]]:
        """Those of these that were matched more often, or as often and used later: with hits and last use."""
        (least, since), hits, used, holders = than, self.hits, self._used, self._holders
        return [
            ((num, NEVER if holders[block] else used[block]), block)
            for block in blocks
            if (num := hits[block]) > least or (num == least and (used[block] > since or holders[block]))
        ]

    def used_later(self, blocks: Sequence[BlockId], than: Rank) -> list[tuple[Rank, BlockId]]:
        """Those of these that are held, were used later, or as late and matched more often: with last use and hits."""
        (since, least), hits, used, holders = than, self.hits, self._used, self._holders
        return [
            ((NEVER if holders[block] else moment, hits[block]), block)
            for block in blocks
            if (moment := used[block]) > since or holders[block] or (moment == since and hits[block] > least)
        ]

    def num_like(self, blocks: Sequence[BlockId], owner: str, pinned: bool, hits: int | None) -> int:
        """How many of these, from the first one on, have this owner, are pinned or not, and have these hits, if any."""
        shelf = self._shelves.get(owner)
        pins = None if shelf is None else shelf.pins
        owners, line_of, counts = self._owners, self._line_of, self.hits
        for number, block in enumerate(blocks):
            other_hits = hits is not None and counts[block] != hits
            if owners[block] != owner or (line_of[block] is pins) is not pinned or other_hits:
                return number
        return len(blocks)

    def is_held(self, block: BlockId) -> bool:
        """Whether anybody holds it."""
        return self._holders[block] > 0

    def is_pinned(self, block: BlockId) -> bool:
        """Whether a published block is evicted last."""
        line = self._line_of[block]
        return line is not None and line is line.shelf.pins

    def is_labelled(self, block: BlockId) -> bool:
        """Whether it has a hash."""
        return self._line_of[block] is not None

    def is_writable(self, block: BlockId) -> bool:
        """Whether its holder may write into it: exactly one holder and no hash."""
        return self._holders[block] == 1 and self._line_of[block] is None

    def take(self, tenant: str, num: int) -> list[BlockId]:
        """Hand out free blocks, each held once; there must be so many (evict first)."""
        free, holders, owners = self._free, self._holders, self._owners
        if num > len(free):
            raise InvariantBroken(f"{num} blocks are to be handed out and {len(free)} are free")
        blocks = free[: -num - 1 : -1]
        del free[len(free) - num :]
        for block in blocks:
            holders[block] = 1
            owners[block] = tenant
        return blocks

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Add one holder to each of these shared or cached blocks."""
        holders, line_of = self._holders, self._line_of
        for block in blocks:
            before = holders[block]
            if not before:
                line = line_of[block]
                if line is None:
                    raise InvariantBroken(f"block {block} is to be shared but has no hash")
                del line[block]
            holders[block] = before + 1

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
                del proven[block]
                new[block] = None
                self._line_of[block], self._proven[block] = new, False

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Take one holder away from each, in this order; the last one leaves a block cached if hashed, else free."""
        holders, line_of, now, free = self._holders, self._line_of, self.now, self._free
        used, worths, mortal = self._used, self._worths, self._mortal
        for block in blocks:
            left = holders[block] - 1
            holders[block] = left
            if not left:
                line = line_of[block]
                if line is None:
                    free.append(block)
                    continue
                line[block] = None
                used[block] = now
                if mortal and worths[block].ttl_s != NEVER:
                    self._expiry.watch(block, now + worths[block].ttl_s)
            elif left < 0:
                raise InvariantBroken(f"block {block} was released more often than it was held")

    def label(self, block: BlockId, owner: str, worth: Worth) -> None:
        """A held block has a hash: from now on it is read-only. `owner` answers for its memory."""
        if not self.is_writable(block):
            raise InvariantBroken(f"block {block} is to be published but is not private to one holder")
        self._owners[block] = owner
        shelf = self._shelves.get(owner)
        if shelf is None:
            shelf = self._shelves[owner] = Shelf(owner)
        shelf.num_published += 1
        self._line_of[block] = shelf.line(worth.rank)
        self._worths[block] = worth
        self._mortal = self._mortal or worth.ttl_s != NEVER
        self._proven[block] = False
        self.hits[block] = 0

    def unlabel(self, blocks: Sequence[BlockId]) -> None:
        """These have a hash no longer; unheld ones become free, in this order."""
        holders, line_of, free = self._holders, self._line_of, self._free
        for block in blocks:
            line = line_of[block]
            if line is None:
                raise InvariantBroken(f"block {block} is to lose a hash that it does not have")
            line_of[block] = None
            line.shelf.num_published -= 1
            if not holders[block]:
                del line[block]
                free.append(block)

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
            moment = self._used[block] + self._worths[block].ttl_s
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
        old = self._line_of[block]
        if old is None:
            raise InvariantBroken(f"block {block} is to be kept but has no hash")
        line = self._line_of[block] = old.shelf.line(rank, proven=self._proven[block])
        if not self._holders[block]:
            del old[block]
            line[block] = None
            self._used[block] = self.now
