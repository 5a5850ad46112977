"""BlockPool: who holds each block of device memory, and which block is handed out or given up next.

A block's state is two facts, held or not and hashed or not:

              no hash     hash
    held      private     shared    (shared: read-only)
    unheld    free        cached    (cached: may be evicted)

    free + cached + held == num_blocks, always.

Writable means exactly one holder and no hash; that is the whole copy-on-write rule.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool in numbers of blocks; `free + cached + held == total`."""

    total: int
    free: int
    cached: int
    held: int


class Shelf:
    """One owner's published blocks; the unheld ones in the order in which they were let go, oldest first."""

    __slots__ = ("cached", "num_published")

    def __init__(self) -> None:
        self.cached: OrderedDict[BlockId, None] = OrderedDict()
        self.num_published = 0
        """Held ones included."""


class BlockPool:
    """Counts holders, keeps hashes, and orders unheld hashed blocks by when they were last let go.

    The order of a shelf is its eviction order, least recently released first. Whoever releases a prefix releases its
    tail first; then a parent is never older than its child, and the oldest block of an owner is always a leaf.
    """

    __slots__ = ("_free", "_hashes", "_holders", "_owners", "_shelf_of", "_shelves", "num_blocks", "num_cached")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._owners = [""] * num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._shelves: dict[str, Shelf] = {}
        self._shelf_of: list[Shelf | None] = [None] * num_blocks
        self.num_cached = 0

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

    def hold(self, blocks: list[BlockId]) -> None:
        """Add one holder to each of these shared or cached blocks."""
        holders, shelf_of = self._holders, self._shelf_of
        for block in blocks:
            if not holders[block]:
                shelf = shelf_of[block]
                if shelf is None:
                    raise InvariantBroken(f"block {block} is to be shared but has no hash")
                del shelf.cached[block]
                self.num_cached -= 1
            holders[block] += 1

    def release(self, block: BlockId) -> None:
        """Take one holder away; the last one leaves the block cached if it has a hash, else free."""
        left = self._holders[block] - 1
        if left < 0:
            raise InvariantBroken(f"block {block} was released more often than it was held")
        self._holders[block] = left
        if left == 0:
            shelf = self._shelf_of[block]
            if shelf is None:
                self._free.append(block)
            else:
                shelf.cached[block] = None
                self.num_cached += 1

    def label(self, block: BlockId, name: BlockHash, owner: str) -> None:
        """Give a held block its hash: from now on it is read-only. `owner` answers for its memory."""
        if not self.is_writable(block):
            raise InvariantBroken(f"block {block} is to be published but is not private to one holder")
        self._hashes[block] = name
        self._owners[block] = owner
        shelf = self._shelves.get(owner)
        if shelf is None:
            shelf = self._shelves[owner] = Shelf()
        shelf.num_published += 1
        self._shelf_of[block] = shelf

    def unlabel(self, block: BlockId) -> None:
        """Take the hash away; an unheld block becomes free."""
        shelf = self._shelf_of[block]
        if shelf is None:
            raise InvariantBroken(f"block {block} is to lose a hash that it does not have")
        self._hashes[block] = self._shelf_of[block] = None
        shelf.num_published -= 1
        if not self._holders[block]:
            del shelf.cached[block]
            self.num_cached -= 1
            self._free.append(block)

    def holders(self) -> tuple[int, ...]:
        """Number of holders of every block, for checks."""
        return tuple(self._holders)

    def cached_order(self) -> tuple[BlockId, ...]:
        """The cached blocks, each owner's next to be evicted first, for checks."""
        return tuple(block for shelf in self._shelves.values() for block in shelf.cached)
