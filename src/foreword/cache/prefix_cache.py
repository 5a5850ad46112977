"""PrefixCache: identity, pool and index put together; the only way for the scheduler to touch any of them.

acquire   find the longest match and hold all of it          -> Lease
reserve   make room to write the next tokens                 -> copies to do, or None (no room, nothing changed)
publish   what a committed step wrote becomes findable
release   give all back, tail first
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, BlockId
from foreword.base.params import Reach
from foreword.cache.blocks import BlockPool, PoolState
from foreword.cache.explain import Reason
from foreword.cache.identity import PUBLIC, Chain
from foreword.cache.index import PrefixIndex
from foreword.cache.lease import Lease
from foreword.cache.orders import Copy
from foreword.cache.policy import most_over_share, spare


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush did, in blocks."""

    dropped: int
    """Unheld blocks that are free now."""
    still_held: int
    """Blocks that running requests go on reading; nobody else finds them, and they are freed when let go."""


class PrefixCache:
    """Blocks of KV that requests share by prefix. Pure bookkeeping: it orders copies and moves no byte itself."""

    __slots__ = ("_index", "_pool", "_public", "_shares", "block_size", "generation", "num_evicted", "off")

    def __init__(
        self, num_blocks: int, block_size: int, *, off: Reason | None = None, shares: Mapping[str, int] | None = None
    ) -> None:
        """`off`: why nothing is reused; None where it is.

        `shares`: blocks that each tenant is sure of, by name; together at most `num_blocks`.
        """
        self._shares: Mapping[str, int] = shares or {}
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._public: frozenset[BlockHash] | None = None
        """What may be stored as public. None: nobody has said yet, and chains know."""
        self.block_size = block_size
        self.off: Reason | None = off
        """Why nothing matches and nothing is published (all else is the same); None: prefixes are reused."""
        self.generation = 0
        """Raised by flush; a lease of an older generation publishes nothing."""
        self.num_evicted = 0

    @property
    def enabled(self) -> bool:
        """Whether prefixes are reused."""
        return self.off is None

    def num_available(self, tenant: str) -> int:
        """Blocks that a tenant can have without taking any from a holder, or from another's share."""
        pool, shares = self._pool, self._shares
        spares = (spare(owner, shelf, shares.get(owner, 0), tenant) for owner, shelf in pool.shelves.items())
        return pool.num_free + sum(spares)

    def state(self) -> PoolState:
        """The pool in numbers of blocks."""
        return self._pool.state()

    def owned(self) -> dict[str, int]:
        """Cached blocks of each owner. Safe to call from any thread (it may be a moment old)."""
        return {owner: len(shelf.cached) for owner, shelf in tuple(self._pool.shelves.items())}

    def match(self, chain: Chain, reach: Reach) -> int:
        """How many leading full blocks could be reused now; holds nothing. Never covers the last token."""
        if not self.enabled:
            return 0
        return self._index.match(chain.hashes, _limit(chain, reach) // self.block_size)

    def reason(self, chain: Chain, reach: Reach, matched_tokens: int) -> Reason:
        """Why a match of so many tokens ends where it does."""
        if self.off is not None:
            return self.off
        if matched_tokens == _limit(chain, reach):
            return "complete" if matched_tokens == len(chain) - 1 else "prefix_length"
        if len(chain) <= self.block_size:
            return "too_short"
        block = matched_tokens // self.block_size
        if self._index.is_continued(chain.parent(block), chain.content(block).extras):
            return "diverged"
        return "never_seen"

    def acquire(self, chain: Chain, reach: Reach) -> Lease:
        """Find the longest match, to the token, and hold every block of it."""
        matched = self.match(chain, reach)
        blocks = self._index.blocks(chain.hashes[:matched])
        tokens = matched * self.block_size
        rest = _limit(chain, reach) - tokens
        if rest > 0 and self.enabled:
            near = self._index.nearest(chain.parent(matched), chain.content(matched))
            if near is not None:
                blocks.append(near[0])
                tokens += min(rest, near[1])
        self._pool.hold(blocks)
        lease = Lease(chain.tenant.name, blocks, tokens, reach, self.generation)
        lease.published = matched
        return lease

    def reserve(self, lease: Lease, start: int, end: int) -> tuple[Copy, ...] | None:
        """Make positions start..end (exclusive) writable: new blocks, a private copy if `start` lies in a shared one.

        None means that the pool has no room even after evicting; nothing is changed then.
        """
        size = self.block_size
        first = start // size
        copy = start % size != 0 and not self._pool.is_writable(lease.blocks[first])
        need = -(-end // size) - len(lease.blocks)
        if need + copy == 0:
            return ()
        if need + copy > self._pool.num_free and need + copy > self.num_available(lease.tenant):
            return None
        copies: tuple[Copy, ...] = ()
        if copy:
            source, private = lease.blocks[first], self._take(lease.tenant)
            lease.blocks[first] = private
            lease.sources.append(source)
            copies = (Copy(source, private, start % size),)
        lease.blocks.extend(self._take(lease.tenant) for _ in range(need))
        return copies

    def publish(self, lease: Lease, chain: Chain, computed: int) -> None:
        """After a step came back: copies are done, and full blocks up to `computed` tokens become findable."""
        while lease.sources:
            self._pool.release(lease.sources.pop())
        if not self.enabled or lease.generation != self.generation:
            return
        full = computed // self.block_size
        if full == lease.published:
            return
        for i in range(lease.published, lease.reach.storable(full, self.block_size)):
            name, block = chain.hashes[i], lease.blocks[i]
            canonical = self._index.find(name)
            if canonical is None and i < chain.first_private and not self._may_be_public(name):
                return  # it was made public no longer after this chain was hashed
            if canonical is None:
                if i and self._index.find(chain.parent(i)) is None:
                    raise InvariantBroken(f"block {block} is to be published but nothing that it continues is")
                self._pool.label(block, name, chain.owner(i))
                self._index.publish(name, chain.parent(i), chain.content(i), block)
            elif canonical != block:
                # Somebody published the same content first. Ours stays private; holding theirs as well keeps
                # the parent of whatever we publish next from being evicted under it.
                self._pool.hold([canonical])
                lease.shadows[i] = canonical
            lease.published = i + 1

    def release(self, lease: Lease) -> None:
        """Give back all that the lease holds; published blocks stay cached. The lease is empty afterwards."""
        for block in lease.held():
            self._pool.release(block)
        lease.blocks, lease.shadows, lease.sources, lease.published = [], {}, [], 0

    def flush(self) -> Flushed:
        """Forget every published block. Running requests keep reading theirs, and publish nothing of them again."""
        before = self._pool.state()
        for block in self._index.clear():
            self._pool.unlabel(block)
        self.generation += 1
        return Flushed(dropped=before.cached, still_held=before.held)

    def quarantine(self, name: BlockHash) -> int:
        """Forget a block and all that continues it; running requests publish nothing more. Blocks that were dropped."""
        order, todo = list[BlockHash](), [name]
        while todo:
            name = todo.pop()
            if self._index.find(name) is not None:
                order.append(name)
                todo += self._index.children(name)
        for found in reversed(order):
            self._pool.unlabel(self._index.drop(found))
        self.generation += 1
        return len(order)

    def share(self, public: frozenset[BlockHash]) -> int:
        """These hashes are public from now on. What no longer is goes, with all that continues it: its number."""
        gone, self._public = (self._public or frozenset()) - public, public
        return sum(self.quarantine(name) for name in gone if self._index.find(name) is not None)

    def _may_be_public(self, name: BlockHash) -> bool:
        return self._public is None or name in self._public

    def check_idle(self) -> None:
        """What must hold when nobody holds anything; cheap enough for every such moment. Raises InvariantBroken."""
        state = self._pool.state()
        if state.held:
            raise InvariantBroken(f"nothing runs and {state.held} blocks are held: {state}")
        if len(self._index) != state.cached:
            raise InvariantBroken(f"{len(self._index)} blocks can be found and {state.cached} are cached: {state}")

    def shut(self) -> None:
        """Reuse nothing and publish nothing from now on."""
        self.flush()
        self.off = "cache_disabled"

    def check(self, leases: Iterable[Lease]) -> None:
        """Compare the books with the leases that exist; InvariantBroken on the first contradiction. O(blocks)."""
        holders = [0] * self._pool.num_blocks
        for lease in leases:
            for block in lease.held():
                holders[block] += 1
        if tuple(holders) != self._pool.holders():
            wrong = [i for i, n in enumerate(self._pool.holders()) if n != holders[i]]
            raise InvariantBroken(f"blocks {wrong[:8]} are held by other leases than the pool counts")
        state = self._pool.state()
        if state.held != sum(1 for n in holders if n):
            raise InvariantBroken(f"pool does not add up: {state}, {sum(1 for n in holders if n)} held by leases")
        self._check_index()

    def _check_index(self) -> None:
        published = {block for _, block in self._index}
        if len(published) != len(self._index):
            raise InvariantBroken("one block is published under two hashes")
        for name, block in self._index:
            if self._pool.hash_of(block) != name:
                raise InvariantBroken(f"block {block} is published under a hash that it does not carry")
        self._check_order()

    def _check_order(self) -> None:
        """In the order of eviction no block comes before one that continues it, and public ones never come."""
        gone: set[BlockHash] = set()
        for owner, shelf in self._pool.shelves.items():
            for block in shelf.cached:
                name = self._pool.hash_of(block)
                if name is None or self._index.find(name) != block:
                    raise InvariantBroken(f"block {block} is cached but not findable")
                if owner != PUBLIC and any(child not in gone for child in self._index.children(name)):
                    raise InvariantBroken(f"block {block} would be evicted before a block that continues it")
                gone.add(name)
        if sum(len(shelf.cached) for shelf in self._pool.shelves.values()) != self._pool.num_cached:
            raise InvariantBroken("the pool miscounts its cached blocks")

    def _take(self, tenant: str) -> BlockId:
        block = self._pool.take()
        if block is None:
            self._evict(tenant)
            block = self._pool.take()
        if block is None:
            raise InvariantBroken("the pool promised a block and has none")
        return block

    def _evict(self, tenant: str) -> None:
        shelves = self._pool.shelves
        owner = most_over_share(shelves, self._shares, tenant)
        if owner is None:
            return
        block = next(iter(shelves[owner].cached))
        name = self._pool.hash_of(block)
        if name is None:
            raise InvariantBroken(f"block {block} is cached without a hash")
        self._index.drop(name)
        self._pool.unlabel(block)
        self.num_evicted += 1


def _limit(chain: Chain, reach: Reach) -> int:
    """Tokens that a match may cover: never the last one, whose logits are wanted."""
    return reach.readable(len(chain) - 1)
