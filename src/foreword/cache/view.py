"""Walk: a bounded look at the tree of published blocks, in portions small enough to fit between two steps."""

from array import array
from collections import deque
from dataclasses import dataclass

from foreword.base.ids import BlockHash, BlockId
from foreword.cache.blocks import BlockPool
from foreword.cache.expiry import NEVER
from foreword.cache.identity import PUBLIC
from foreword.cache.index import PrefixIndex

_PORTION = 1_000
"""Blocks looked at in one go: one to two milliseconds."""
_SHOWN_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A run of blocks of one owner that is not branched."""

    name: BlockHash
    """The hash of its last block."""
    parent: BlockHash | None
    """The last block of the run that it continues, if that is in the view."""
    owner: str
    num_blocks: int
    begins: tuple[int, ...]
    """Its first tokens."""
    hits: int | None
    """Requests whose match passed its first block. None, as the next two: others' use of public blocks is not shown."""
    last_used_s: float | None
    """On the engine's clock; of its first block, which is used at least as often as the others."""
    held: bool | None
    """Whether a running request uses it now."""
    pinned: bool
    """Whether its first block is."""
    priority: int
    ttl_s: float
    num_children: int
    """Runs that continue it, in the view or not."""


class Walk:
    """The tree from the top down, level by level and the most lately used first, until there are `limit` nodes."""

    __slots__ = ("_limit", "_owner", "_start", "_todo", "more", "nodes")

    def __init__(self, *, owner: str | None = None, start: BlockHash | None = None, limit: int = 100) -> None:
        """`owner`: only what is this one's; None: everybody's. `start`: only what continues this block."""
        self._owner = owner
        self._start = start
        self._limit = limit
        self._todo: deque[tuple[BlockHash | None, BlockHash]] | None = None
        self.nodes: list[Node] = []
        self.more = False
        """Whether the limit has cut anything off."""

    def go(self, index: PrefixIndex, pool: BlockPool) -> bool:
        """Look at some more of it; False once it is done. What leaves the tree in between is left out."""
        if self._todo is None:
            tops = [self._start] if self._start is not None else sorted(index.roots)
            self._todo = deque((self._start, name) for top in tops for name in self._below(top, index, pool))
        seen = 0
        while self._todo and seen < _PORTION:
            if len(self.nodes) >= self._limit:
                self.more = True
                return False
            seen += self._visit(*self._todo.popleft(), index, pool)
        return bool(self._todo)

    def _visit(self, parent: BlockHash | None, first: BlockHash, index: PrefixIndex, pool: BlockPool) -> int:
        block = index.find(first)
        if block is None:
            return 1
        last, num_blocks, tokens = first, 1, array("I", index.content(first).raw)
        below = self._below(first, index, pool)
        while len(below) == 1 and self._is_one(last, below[0], index, pool):
            last = below[0]
            if len(tokens) < _SHOWN_TOKENS:
                tokens.frombytes(index.content(last).raw)
            num_blocks += 1
            below = self._below(last, index, pool)
        worth, hidden = pool.worth_of(block), self._hides(block, pool)
        self.nodes.append(
            Node(
                name=last,
                parent=parent,
                owner=pool.owner_of(block),
                num_blocks=num_blocks,
                begins=tuple(tokens[:_SHOWN_TOKENS]),
                hits=None if hidden else pool.hits[block],
                last_used_s=None if hidden else pool.last_used(block),
                held=None if hidden else pool.is_held(block),
                pinned=pool.is_pinned(block),
                priority=worth.rank,
                ttl_s=worth.ttl_s,
                num_children=len(below),
            )
        )
        if self._todo is not None:
            self._todo.extend((last, name) for name in below)
        return num_blocks

    def _is_one(self, name: BlockHash, below: BlockHash, index: PrefixIndex, pool: BlockPool) -> bool:
        """Whether a block and its only continuation are one run: of one owner, and both pinned or none."""
        one, other = index.blocks([name, below])
        same = pool.owner_of(one) == pool.owner_of(other) and pool.is_pinned(one) == pool.is_pinned(other)
        return same and (self._hides(one, pool) or pool.hits[one] == pool.hits[other])

    def _hides(self, block: BlockId, pool: BlockPool) -> bool:
        """Whether the use of a block, and with it the order among such blocks, is not this view's to show."""
        return self._owner not in (None, PUBLIC) and pool.owner_of(block) == PUBLIC

    def _below(self, name: BlockHash, index: PrefixIndex, pool: BlockPool) -> list[BlockHash]:
        """What continues a block, the most lately used first; under a tenant's eyes only what is its own or public."""
        found: list[tuple[float, BlockHash]] = []
        for child, block in index.continued(name):
            if self._owner is None or pool.owner_of(block) in (self._owner, PUBLIC):
                found.append((NEVER if self._hides(block, pool) else pool.last_used(block), child))
        return [child for _, child in sorted(found, reverse=True)]
