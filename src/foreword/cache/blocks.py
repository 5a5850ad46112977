"""BlockPool: who holds each block of device memory, and which block is handed out or given up next.

A block's state is two facts, held or not and hashed or not:

              no hash     hash
    held      private     shared    (shared: read-only)
    unheld    free        cached    (cached: may be evicted)

    free + cached + held == num_blocks, always.

Writable means exactly one holder and no hash; that is the whole copy-on-write rule.
"""

from collections import OrderedDict
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


class BlockPool:
    """Counts holders, keeps hashes, and orders unheld hashed blocks by when they were last let go.

    The cached blocks' order is the eviction order, least recently released first. Whoever releases a prefix must
    release its tail first; then a parent is never older than its child and the oldest block is always a leaf.
    """

    __slots__ = ("_cached", "_free", "_hashes", "_holders", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking any from a holder: free and cached ones."""
        return len(self._free) + len(self._cached)

    def state(self) -> PoolState:
        """The pool in numbers. Safe to call from any thread (it may be a moment old)."""
        free, cached = len(self._free), len(self._cached)
        return PoolState(self.num_blocks, free, cached, self.num_blocks - free - cached)

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The hash under which the block is published, if it is."""
        return self._hashes[block]

    def is_writable(self, block: BlockId) -> bool:
        """Whether its holder may write into it: exactly one holder and no hash."""
        return self._holders[block] == 1 and self._hashes[block] is None

    def take(self) -> BlockId | None:
        """Hand out a free block, held once; None if there is none (evict first)."""
        if not self._free:
            return None
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def hold(self, blocks: list[BlockId]) -> None:
        """Add one holder to each of these shared or cached blocks."""
        holders, cached = self._holders, self._cached
        for block in blocks:
            if not holders[block]:
                del cached[block]
            holders[block] += 1

    def release(self, block: BlockId) -> None:
        """Take one holder away; the last one leaves the block cached if it has a hash, else free."""
        left = self._holders[block] - 1
        if left < 0:
            raise InvariantBroken(f"block {block} was released more often than it was held")
        self._holders[block] = left
        if left == 0:
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def label(self, block: BlockId, name: BlockHash) -> None:
        """Give a held block its hash: from now on it is read-only."""
        if not self.is_writable(block):
            raise InvariantBroken(f"block {block} is to be published but is not private to one holder")
        self._hashes[block] = name

    def unlabel(self, block: BlockId) -> None:
        """Take the hash away; an unheld block becomes free."""
        self._hashes[block] = None
        if not self._holders[block]:
            del self._cached[block]
            self._free.append(block)

    def oldest_cached(self) -> BlockId | None:
        """The cached block to evict next; O(1)."""
        return next(iter(self._cached), None)

    def holders(self) -> tuple[int, ...]:
        """Number of holders of every block, for checks."""
        return tuple(self._holders)

    def cached_order(self) -> tuple[BlockId, ...]:
        """The cached blocks, next to be evicted first, for checks."""
        return tuple(self._cached)
