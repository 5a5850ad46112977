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
from foreword.cache.fault import Doubt, Fault
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

    __slots__ = (
        "_index",
        "_lost",
        "_pool",
        "_public",
        "_shares",
        "_stopped",
        "block_size",
        "generation",
        "num_evicted",
        "off",
    )

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
        self._stopped: frozenset[str] = frozenset()
        """Tenants for whom nothing is reused, since their books were found wrong."""
        self._lost: frozenset[BlockId] = frozenset()
        """Blocks that were held when nobody could hold any: never used again."""
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

    def reuses(self, tenant: str) -> bool:
        """Whether this tenant's prefixes are."""
        return self.off is None and tenant not in self._stopped

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
        if not self.reuses(chain.tenant.name):
            return 0
        return self._index.match(chain.hashes, _limit(chain, reach) // self.block_size)

    def reason(self, chain: Chain, reach: Reach, matched_tokens: int) -> Reason:
        """Why a match of so many tokens ends where it does."""
        if self.off is not None:
            return self.off
        if chain.tenant.name in self._stopped:
            return "cache_disabled"
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
        if rest > 0 and self.reuses(chain.tenant.name):
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
        if not self.reuses(lease.tenant) or lease.generation != self.generation:
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

    def idle_fault(self) -> Fault | None:
        """What is wrong now that nobody may hold anything; cheap enough for every such moment."""
        state, lost = self._pool.state(), len(self._lost)
        if state.held == lost and len(self._index) == state.cached:
            return None
        doubts = self.doubts(())
        if doubts and len(self._index) == state.cached + sum(doubt.hash is not None for doubt in doubts):
            return Fault(f"nothing runs and {len(doubts)} blocks are held: {state}", doubts)
        if self.off is not None and not doubts:
            return None  # nothing is left to stop
        return Fault(f"nothing runs, {len(self._index)} blocks can be found and {state.cached} are cached: {state}")

    def stop(self, fault: Fault) -> None:
        """For those whom a fault is about, reuse nothing and publish nothing from now on."""
        self._lost |= {doubt.block for doubt in fault.doubts}
        if fault.tenants is None:
            self.flush()
            self.off = "cache_disabled"
            return
        self._stopped |= fault.tenants
        for name in [name for name, block in self._index if self._pool.owner_of(block) in self._stopped]:
            self.quarantine(name)

    def doubts(self, leases: Iterable[Lease]) -> tuple[Doubt, ...]:
        """The blocks that the pool counts other holders of than there are leases. O(blocks)."""
        pool, counted = self._pool, self._pool.holders()
        held = [n if block in self._lost else 0 for block, n in enumerate(counted)]
        for lease in leases:
            for block in lease.held():
                held[block] += 1
        return tuple(
            Doubt(BlockId(i), counted[i], held[i], pool.owner_of(BlockId(i)), _short(pool.hash_of(BlockId(i))))
            for i in range(pool.num_blocks)
            if counted[i] != held[i]
        )

    def check(self, leases: Iterable[Lease]) -> None:
        """Compare the books with the leases that exist; InvariantBroken on the first contradiction. O(blocks)."""
        wrong = self.doubts(leases)
        if wrong:
            blocks = [doubt.block for doubt in wrong[:8]]
            raise InvariantBroken(f"blocks {blocks} are held by other leases than the pool counts")
        state = self._pool.state()
        held = sum(1 for n in self._pool.holders() if n)
        if state.held != held:
            raise InvariantBroken(f"pool does not add up: {state}, {held} blocks have holders")
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
        block = self._pool.take(tenant)
        if block is None:
            self._evict(tenant)
            block = self._pool.take(tenant)
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


def _short(name: BlockHash | None) -> str | None:
    return None if name is None else name.hex()[:12]
