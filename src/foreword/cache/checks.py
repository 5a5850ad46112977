"""What must hold between pool, index and leases; for tests and for the check when an engine is idle."""

from collections.abc import Collection, Iterable

from foreword.base.errors import InvariantBroken, amount
from foreword.base.ids import BlockHash, BlockId
from foreword.cache.blocks import BlockPool, Shelf
from foreword.cache.fault import Doubt, Fault
from foreword.cache.identity import PUBLIC
from foreword.cache.index import PrefixIndex
from foreword.cache.lease import Lease


def doubts_of(
    pool: BlockPool, index: PrefixIndex, lost: Collection[BlockId], leases: Iterable[Lease]
) -> tuple[Doubt, ...]:
    """The blocks that the pool counts other holders of than there are leases, less those known as lost. O(blocks)."""
    counted = pool.holders()
    held = [n if block in lost else 0 for block, n in enumerate(counted)]
    for lease in leases:
        for block in lease.held():
            held[block] += 1
    return tuple(
        Doubt(BlockId(i), counted[i], held[i], pool.owner_of(BlockId(i)), _short(index.name_of(BlockId(i))))
        for i in range(pool.num_blocks)
        if counted[i] != held[i]
    )


def idle_fault(pool: BlockPool, index: PrefixIndex, lost: Collection[BlockId]) -> Fault | None:
    """What is wrong when nobody may hold anything; O(1) when nothing is."""
    state = pool.state()
    if state.held == len(lost) and len(index) == state.cached:
        return None
    doubts = doubts_of(pool, index, lost, ())
    if doubts and len(index) == state.cached + sum(doubt.hash is not None for doubt in doubts):
        return Fault(f"nothing runs and somebody holds {amount(len(doubts), 'block')}: {state}", doubts)
    return Fault(f"nothing runs, {len(index)} blocks can be found and {state.cached} are cached: {state}")


def _short(name: BlockHash | None) -> str | None:
    return None if name is None else name.hex()[:12]


def check_books(pool: BlockPool, index: PrefixIndex) -> None:
    """Raise InvariantBroken if index and pool contradict each other. O(blocks)."""
    published = {block for _, block in index}
    if len(published) != len(index):
        raise InvariantBroken("one block is published under two hashes")
    for name, block in index:
        if index.name_of(block) != name or not pool.is_labelled(block):
            raise InvariantBroken(f"block {block} is published under a hash that it does not carry")
    for shelf in pool.shelves.values():
        _check_order(index, shelf)


def _check_order(index: PrefixIndex, shelf: Shelf) -> None:
    """In the order of eviction no block comes before one that continues it, and public ones never come."""
    gone: set[BlockHash] = set()
    for block in shelf.order():
        name = index.name_of(block)
        if name is None or index.find(name) != block:
            raise InvariantBroken(f"block {block} is cached but not findable")
        if shelf.owner != PUBLIC and any(child not in gone for child in index.children(name)):
            raise InvariantBroken(f"block {block} would be evicted before a block that continues it")
        gone.add(name)
