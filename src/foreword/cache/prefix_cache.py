"""PrefixCache: identity, pool and index put together; the only way for the scheduler to touch any of them.

advance   what time it is; what has expired goes
acquire   find the longest match and hold all of it          -> Lease
explain   why a match ended where it did                     -> Explanation
reserve   make room to write the next tokens                 -> copies to do, or None (no room, nothing changed)
publish   what a committed step wrote becomes findable
release   give all back, tail first
pin       let a prefix be evicted last                       -> Pinned
flush     forget everything, or one tenant's, or one prefix  -> Flushed
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, BlockId
from foreword.base.params import AS_USUAL, Keep, Reach
from foreword.cache.blocks import BlockPool, PoolState, Worth
from foreword.cache.checks import check_books, doubts_of, idle_fault
from foreword.cache.departed import Cause, Departed
from foreword.cache.expiry import NEVER
from foreword.cache.explain import Explanation, Reason, explain
from foreword.cache.fault import Doubt, Fault
from foreword.cache.generations import Below, Generations, Scope
from foreword.cache.identity import PUBLIC, Chain
from foreword.cache.index import PrefixIndex
from foreword.cache.lease import Lease
from foreword.cache.orders import Copy
from foreword.cache.pins import Pin, Pinned, Pins
from foreword.cache.policy import PUBLIC_WORTH, named, next_to_give, spare, worth
from foreword.cache.view import Walk


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
        "_departed",
        "_generations",
        "_index",
        "_lost",
        "_pin_blocks",
        "_pins",
        "_pool",
        "_public",
        "_shares",
        "_ttl_s",
        "block_size",
        "off",
        "stopped",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        off: Reason | None = None,
        shares: Mapping[str, int] | None = None,
        ttl_s: float = NEVER,
        pin_blocks: int = 0,
    ) -> None:
        """`off`: why nothing is reused; None where it is.

        `shares`: blocks that each tenant is sure of, by name, together at most all; None: there is one tenant only.
        `ttl_s`: how long blocks are kept after their last use unless a request says otherwise. `pin_blocks`: how many
        may be pinned in all; of a tenant's share the same part.
        """
        self._shares = shares
        self._ttl_s = ttl_s
        self._pin_blocks = pin_blocks
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks)
        self._departed = Departed()
        self._generations = Generations()
        self._pins = Pins()
        self._public: frozenset[BlockHash] | None = None
        """What may be stored as public. None: nobody has said yet, and chains know."""
        self.stopped: frozenset[str] = frozenset()
        """Tenants for whom nothing is reused, since their books were found wrong. Safe to read from any thread."""
        self._lost: frozenset[BlockId] = frozenset()
        """Blocks that were held when nobody could hold any: never used again."""
        self.block_size = block_size
        self.off: Reason | None = off
        """Why nothing matches and nothing is published (all else is the same); None: prefixes are reused."""

    @property
    def enabled(self) -> bool:
        """Whether prefixes are reused."""
        return self.off is None

    def reuses(self, tenant: str) -> bool:
        """Whether this tenant's prefixes are."""
        return self.off is None and tenant not in self.stopped

    @property
    def generation(self) -> int:
        """Raised whenever something is forgotten on purpose."""
        return self._generations.current

    @property
    def departures(self) -> Mapping[Cause, int]:
        """Blocks that left so far, by cause. Safe to read from any thread."""
        return self._departed.counts

    @property
    def num_evicted(self) -> int:
        """Blocks that left since somebody needed the room."""
        return self._departed.counts["pressure"] + self._departed.counts["quota"]

    def num_available(self, tenant: str) -> int:
        """Blocks that a tenant can have without taking any from a holder, or from another's share."""
        pool, shares = self._pool, self._shares or {}
        spares = (spare(owner, shelf, shares.get(owner, 0), tenant) for owner, shelf in pool.shelves.items())
        return pool.num_free + sum(spares)

    def state(self) -> PoolState:
        """The pool in numbers of blocks."""
        return self._pool.state()

    def owned(self) -> dict[str, int]:
        """Cached blocks of each owner. Safe to call from any thread (it may be a moment old)."""
        return {owner: shelf.num_cached for owner, shelf in tuple(self._pool.shelves.items())}

    def advance(self, now: float) -> None:
        """It is `now` for whatever comes next. Blocks whose time is up go."""
        self._pool.now = now
        for last in self._pins.lapsed(now):
            self.unpin(last)
        while (expired := self._pool.pop_expired()) is not None:
            self._drop(self._index.below(expired[0]), "expired", expired[1])

    def match(self, chain: Chain, reach: Reach) -> int:
        """How many leading full blocks could be reused now; holds nothing. Never covers the last token."""
        if not self.reuses(chain.tenant.name):
            return 0
        return self._index.match(chain.hashes, _limit(chain, reach) // self.block_size)

    def explain(
        self, chain: Chain, reach: Reach, matched_tokens: int, claims: Container[BlockHash] = ()
    ) -> Explanation:
        """Why a match of so many tokens ends where it does; `claims` are blocks that are being computed."""
        if self.off is not None:
            return Explanation(self.off, matched_tokens)
        if not self.reuses(chain.tenant.name):
            return Explanation("cache_disabled", matched_tokens)
        return explain(chain, reach, matched_tokens, index=self._index, departed=self._departed, claims=claims)

    def find(self, chain: Chain, reach: Reach) -> tuple[list[BlockId], int]:
        """The longest match, to the token: its blocks and how many tokens it covers. Holds nothing."""
        matched = self.match(chain, reach)
        blocks = self._index.blocks(chain.hashes[:matched])
        tokens = matched * self.block_size
        rest = _limit(chain, reach) - tokens
        if rest > 0 and self.reuses(chain.tenant.name):
            near = self._index.nearest(chain.parent(matched), chain.content(matched))
            if near is not None and near[1]:
                blocks += self._index.blocks([near[0]])
                tokens += min(rest, near[1])
        return blocks, tokens

    def acquire(self, chain: Chain, reach: Reach, keep: Keep = AS_USUAL) -> Lease:
        """Find the longest match, to the token, and hold every block of it."""
        blocks, tokens = self.find(chain, reach)
        self._pool.hold(blocks)
        lease = Lease(chain.tenant.name, tuple(blocks), tokens, reach, self.generation)
        lease.published = lease.unstored = tokens // self.block_size
        lease.keep = keep
        if keep.asked:
            self._raise(lease, lease.published, named(keep))
        return lease

    def count_hit(self, lease: Lease) -> None:
        """What a new lease matched was used once more; of the block in which the match ends, half at least."""
        whole, tail = divmod(lease.matched_tokens, self.block_size)
        self._pool.count_hits([*lease.blocks[:whole], *(lease.sources if 2 * tail >= self.block_size else ())])

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
        short = need + copy - self._pool.num_free
        if short > 0:
            if need + copy > self.num_available(lease.tenant):
                return None
            self._evict(lease.tenant, short)
        copies: tuple[Copy, ...] = ()
        if copy:
            source, (private,) = lease.blocks[first], self._pool.take(lease.tenant, 1)
            lease.blocks = (*lease.blocks[:first], private, *lease.blocks[first + 1 :])
            lease.sources.append(source)
            copies = (Copy(source, private, start % size),)
        lease.blocks += tuple(self._pool.take(lease.tenant, need))
        return copies

    def publish(self, lease: Lease, chain: Chain, computed: int) -> int:
        """After a step came back: copies are done, and full blocks up to `computed` tokens become findable.

        How many blocks nobody had published before.
        """
        if lease.sources:
            self._pool.release(lease.sources)
            lease.sources = []
        full = computed // self.block_size
        if full == lease.published or not self.reuses(lease.tenant):
            return 0
        if lease.generation != self.generation:
            if self._generations.concerns(chain, lease.generation):
                return 0
            lease.generation = self.generation
        num_new, storable = 0, lease.reach.storable(full, self.block_size)
        kept = worth(lease.keep, self._ttl_s)
        for i in range(lease.published, storable):
            name, block = chain.hashes[i], lease.blocks[i]
            canonical = self._index.find(name)
            if canonical is None and i < chain.first_private and not self._may_be_public(name):
                break  # it was made public no longer after this chain was hashed
            if canonical is None:
                self._label(chain, i, block, kept)
                self._raise(lease, i, kept)
                num_new += 1
            elif canonical != block:
                # Somebody published the same content first. Ours stays private; holding theirs as well keeps
                # the parent of whatever we publish next from being evicted under it.
                self._pool.hold([canonical])
                lease.shadows[i] = canonical
                self._raise(lease, i + 1, kept)
            lease.published = i + 1
        for i in range(max(lease.unstored, storable), full):
            self._departed.note_unstored(chain.hashes[i], chain.parent(i), chain.content(i))
        lease.unstored = full
        return num_new

    def _label(self, chain: Chain, i: int, block: BlockId, kept: Worth) -> None:
        name, owner = chain.hashes[i], chain.owner(i)
        if i and self._index.find(chain.parent(i)) is None:
            raise InvariantBroken(f"block {block} is to be published but nothing that it continues is")
        self._pool.label(block, owner, PUBLIC_WORTH if owner == PUBLIC else kept)
        self._index.publish(name, chain.parent(i), chain.content(i), block)
        self._departed.note_published(chain, i)
        if self._pins.has(name, owner):
            self._pool.pin(block, pinned=True)

    def _raise(self, lease: Lease, num_blocks: int, kept: Worth) -> None:
        """Keep the first published blocks of a lease at least like this: from the tail up, until one is already."""
        for i in range(num_blocks - 1, -1, -1):
            if not self._pool.raise_(lease.shadows.get(i, lease.blocks[i]), kept):
                return

    def release(self, lease: Lease) -> None:
        """Give back all that the lease holds; published blocks stay cached. The lease is empty afterwards."""
        self._pool.release(lease.held())
        lease.blocks, lease.shadows, lease.sources, lease.published = (), {}, [], 0

    # ---------------------------------------------------------------- pins

    def pin(self, hashes: Sequence[BlockHash], owner: str, until_s: float = NEVER) -> Pinned:
        """Let these blocks of one owner, the beginning of a prefix or what follows its public head, be evicted last."""
        pins, budget = self._pins, self.pin_budget(owner)
        num_cached = sum(self._index.find(name) is not None for name in hashes)
        new = pins.num_new(owner, hashes)
        before, total = pins.num_blocks(owner), pins.num_blocks()
        if before + new > budget or total + new > self._pin_blocks:
            room = min(budget, before + max(0, self._pin_blocks - total))
            return Pinned(False, len(hashes), num_cached, before, room)
        pins.add(Pin(owner, tuple(hashes), until_s))
        for name in reversed(hashes):
            if (block := self._index.find(name)) is not None:
                self._pool.pin(block, pinned=True)
        return Pinned(True, len(hashes), num_cached, pins.num_blocks(owner), budget)

    def unpin(self, last: BlockHash) -> int | None:
        """End the pin of the prefix with this last block. Blocks that nothing pins now; None: there is no such pin."""
        free = self._pins.remove(last)
        for name in free or ():
            block = self._index.find(name)
            if block is not None:
                self._pool.pin(block, pinned=False)
        return None if free is None else len(free)

    def pin_budget(self, owner: str) -> int:
        """Blocks of this owner that may be pinned."""
        if self._shares is None:
            return self._pin_blocks
        return self._pin_blocks * self._shares.get(owner, 0) // self._pool.num_blocks

    def pins(self) -> tuple[Pin, ...]:
        """All pins."""
        return tuple(self._pins)

    def pinned(self) -> dict[str, int]:
        """Pinned blocks of each owner. Safe to call from any thread (it may be a moment old)."""
        return self._pins.owners()

    def look(self, walk: Walk) -> bool:
        """Show a walk some more of the tree; False once it has seen enough."""
        return walk.go(self._index, self._pool)

    # ---------------------------------------------------------------- forgetting

    def flush(self) -> Flushed:
        """Forget every published block and every pin. Running requests keep reading theirs, and publish none of it."""
        before, tree = self._pool.state(), self._index
        self._index = PrefixIndex(self._pool.num_blocks)
        self._pool.unlabel([block for _, block in tree])
        self._pins = Pins()
        self._departed.note_tree(tree, self._pool.now)
        self._generations.advance(None)
        return Flushed(dropped=before.cached, still_held=before.held)

    def flush_tenant(self, tenant: str) -> Flushed:
        """Forget what one tenant has published, with its pins; nobody else loses anything."""
        tops = [
            block
            for name, block in self._index
            if self._pool.owner_of(block) == tenant and self._owner(self._index.parent(name)) != tenant
        ]
        return self._forget([block for top in tops for block in self._index.below(top)], tenant)

    def flush_prefix(self, name: BlockHash) -> Flushed:
        """Forget a block with all that continues it, and what is before it as far as nothing else continues that."""
        path = self._index.path(name)
        while len(path) > 1 and self._is_for(path[-1], path[-2]):
            path.pop()
        if not path:
            return Flushed(0, 0)
        (top,) = self._index.blocks(path[-1:])
        return self._forget(self._index.below(top), Below(path[-1], len(path) - 1))

    def quarantine(self, name: BlockHash) -> int:
        """Forget a wrong block and all that continues it. Blocks that were dropped."""
        return self._forgotten(name, "audit")

    def path(self, name: BlockHash, owner: str | None) -> tuple[BlockHash, ...]:
        """A published block of this owner, or of any, with all of its owner's that it continues; empty if not so."""
        whose = self._owner(name) if owner is None else owner
        return tuple(step for step in self._index.path(name) if self._owner(name) == self._owner(step) == whose)

    def _is_for(self, name: BlockHash, parent: BlockHash) -> bool:
        """Whether a parent has nothing but this one block of the same owner that continues it."""
        return self._index.children(parent) == [name] and self._owner(parent) == self._owner(name)

    def _owner(self, name: BlockHash) -> str | None:
        block = self._index.find(name)
        return None if block is None else self._pool.owner_of(block)

    def _forgotten(self, name: BlockHash, cause: Cause) -> int:
        top = self._index.find(name)
        blocks = [] if top is None else self._index.below(top)
        self._generations.advance(Below(name, len(self._index.path(name)) - 1))
        self._drop(blocks, cause, self._pool.now)
        return len(blocks)

    def _forget(self, blocks: list[BlockId], scope: Scope) -> Flushed:
        held = sum(map(self._pool.is_held, blocks))
        for last in self._pins.concerned(set(self._index.names(blocks))):
            self.unpin(last)
        self._generations.advance(scope)
        self._drop(blocks, "flushed", self._pool.now)
        return Flushed(dropped=len(blocks) - held, still_held=held)

    def _drop(self, blocks: Sequence[BlockId], cause: Cause, now: float) -> None:
        """Take these out of the cache; each stands after the one that it continues."""
        tails_first = blocks[::-1]
        self._departed.note(self._index.drop(tails_first), cause, now)
        self._pool.unlabel(tails_first)

    def share(self, public: frozenset[BlockHash]) -> int:
        """These hashes are public from now on. What no longer is goes, with all that continues it: its number."""
        gone, self._public = (self._public or frozenset()) - public, public
        return sum(self._forgotten(name, "flushed") for name in gone if self._index.find(name) is not None)

    def _may_be_public(self, name: BlockHash) -> bool:
        return self._public is None or name in self._public

    # ---------------------------------------------------------------- checks

    def idle_fault(self) -> Fault | None:
        """What is wrong now that nobody may hold anything; cheap enough for every such moment."""
        fault = idle_fault(self._pool, self._index, self._lost)
        if fault is not None and self.off is not None and not self.doubts(()):
            return None  # nothing is left to stop
        return fault

    def stop(self, fault: Fault) -> None:
        """For those whom a fault is about, reuse nothing and publish nothing from now on."""
        self._lost |= {doubt.block for doubt in fault.doubts}
        if fault.tenants is None:
            self.flush()
            self.off = "cache_disabled"
            return
        self.stopped |= fault.tenants
        for tenant in fault.tenants:
            self.flush_tenant(tenant)

    def doubts(self, leases: Iterable[Lease]) -> tuple[Doubt, ...]:
        """The blocks that the pool counts other holders of than there are leases. O(blocks)."""
        return doubts_of(self._pool, self._index, self._lost, leases)

    def check(self, leases: Iterable[Lease]) -> None:
        """Compare the books with the leases that exist; InvariantBroken on the first contradiction. O(blocks)."""
        wrong = self.doubts(leases)
        if wrong:
            blocks = [doubt.block for doubt in wrong[:8]]
            raise InvariantBroken(f"blocks {blocks} are held by other leases than the pool counts")
        state, held = self._pool.state(), sum(1 for n in self._pool.holders() if n)
        if state.held != held:
            raise InvariantBroken(f"pool does not add up: {state}, {held} blocks have holders")
        check_books(self._pool, self._index)

    def _evict(self, tenant: str, num: int) -> None:
        """Make `num` blocks free that `num_available` has promised."""
        while num > 0 and (found := next_to_give(self._pool.shelves, self._shares or {}, tenant)) is not None:
            shelf, most = found
            self._pool.age(shelf)
            blocks = shelf.first(min(num, most))
            num -= len(blocks)
            self._drop(blocks[::-1], "pressure" if shelf.owner == tenant else "quota", self._pool.now)
            self._pool.age(shelf)


def _limit(chain: Chain, reach: Reach) -> int:
    """Tokens that a match may cover: never the last one, whose logits are wanted."""
    return reach.readable(len(chain) - 1)
