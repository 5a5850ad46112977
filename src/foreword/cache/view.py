"""Walk: a bounded look at the tree of published blocks, in portions small enough to fit between two steps."""

from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Literal

from foreword.base.ids import BlockHash, BlockId
from foreword.cache.blocks import BlockPool, Rank
from foreword.cache.expiry import NEVER
from foreword.cache.identity import PUBLIC
from foreword.cache.index import PrefixIndex

Order = Literal["used", "hits"]
"""Level by level and the most lately used first, or what was hit most often before all else."""

PORTION = 10_000
"""What is looked at in one go, in blocks that are followed from one to the next: a millisecond or two."""
_BATCH = 500
"""Blocks beside each other that are looked at together; the best so far are a measure for those to come."""
_BESIDE, _BEST, _NODE = 2, 8, 150
"""What one of those costs in that measure, what it costs besides when it is among the best so far, and what a node."""
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
    """The tree from the top down, in one of two orders, until there are `limit` nodes.

    A block is hit at least as often as those that continue it, so in the order of hits the nodes are those of the whole
    tree that were hit most. What comes to the tree or leaves it between two portions may be left out.
    """

    __slots__ = (
        "_limit",
        "_order",
        "_owner",
        "_pushed",
        "_ranks",
        "_spent",
        "_start",
        "_steps",
        "_todo",
        "_tree",
        "more",
        "nodes",
    )

    def __init__(
        self, *, owner: str | None = None, start: BlockHash | None = None, limit: int = 100, order: Order = "used"
    ) -> None:
        """`owner`: only what is this one's; None: everybody's. `start`: only what continues this block."""
        self._owner = owner
        self._start = start
        self._limit = limit
        self._order: Order = order
        self._todo: list[tuple[float, int, int, BlockHash | None, BlockHash]] = []
        # Rank, a number of its own, depth, the run that it continues, its first block.
        self._pushed = set[BlockHash]()
        self._ranks = count()
        self._spent = 0
        self._steps: _Steps | None = None
        self._tree: PrefixIndex | None = None
        self.nodes: list[Node] = []
        self.more = False
        """Whether the limit has cut anything off."""

    @property
    def spent(self) -> int:
        """What was looked at in the last portion, in the measure of `PORTION`."""
        return self._spent

    def go(self, index: PrefixIndex, pool: BlockPool) -> bool:
        """Look at some more of it; False once it is done."""
        if self._steps is None:
            self._steps, self._tree = self._all(index, pool), index
        self._spent = 0
        if index is not self._tree:
            return False  # all of it was flushed
        for _ in self._steps:
            return True
        return False

    def _all(self, index: PrefixIndex, pool: BlockPool) -> "_Steps":
        for top in [self._start] if self._start is not None else sorted(index.roots):
            below = yield from self._below(top, index, pool)
            self._push(self._start, 0, below)
        while self._todo:
            if len(self.nodes) >= self._limit:
                self.more = True
                return
            _, _, depth, parent, first = heappop(self._todo)
            yield from self._visit(parent, depth, first, index, pool)

    def _push(self, parent: BlockHash | None, depth: int, below: "_Below") -> None:
        for (hits, _), name in below.best:
            if name in self._pushed:
                continue  # the tree grew between two portions, and it stood further behind
            self._pushed.add(name)
            rank = depth if self._order == "used" else -hits
            heappush(self._todo, (rank, next(self._ranks), depth, parent, name))

    def _visit(
        self, parent: BlockHash | None, depth: int, first: BlockHash, index: PrefixIndex, pool: BlockPool
    ) -> "_Steps":
        block = index.find(first)
        if block is None:
            return
        self._spent += _NODE
        worth, hidden = pool.worth_of(block), self._hides(block, pool)
        hits, last_used, held = pool.hits[block], pool.last_used(block), pool.is_held(block)
        owner, pinned = pool.owner_of(block), pool.is_pinned(block)
        last, num_blocks, tokens = first, 1, array("I", index.content(block).raw)
        like, children = (owner, pinned, None if hidden else hits), None
        while block is not None:
            blocks = index.run(block, max(1, PORTION - self._spent))
            children = None
            self._spent += len(blocks)
            if not blocks:
                # Others' blocks, which this view does not show, must not show by where a public run ends either.
                children = yield from self._below(last, index, pool)
                only = index.find(children.best[0][1]) if children.num == 1 else None
                blocks = [] if only is None else [only]
            same = pool.num_like(blocks, *like)
            for shown in blocks[:same]:
                if len(tokens) >= _SHOWN_TOKENS:
                    break
                tokens.frombytes(index.content(shown).raw)
            if same:
                (last,), num_blocks = index.names(blocks[same - 1 : same]), num_blocks + same
            if self._spent >= PORTION:
                yield
            block = index.find(last) if 0 < same == len(blocks) else None
        if children is None:
            children = yield from self._below(last, index, pool)
        self.nodes.append(
            Node(
                name=last,
                parent=parent,
                owner=owner,
                num_blocks=num_blocks,
                begins=tuple(tokens[:_SHOWN_TOKENS]),
                hits=None if hidden else hits,
                last_used_s=None if hidden else last_used,
                held=None if hidden else held,
                pinned=pinned,
                priority=worth.rank,
                ttl_s=worth.ttl_s,
                num_children=children.num,
            )
        )
        self._push(last, depth + 1, children)

    def _hides(self, block: BlockId, pool: BlockPool) -> bool:
        """Whether the use of a block, and with it the order among such blocks, is not this view's to show."""
        return self._owner not in (None, PUBLIC) and pool.owner_of(block) == PUBLIC

    def _below(self, name: BlockHash, index: PrefixIndex, pool: BlockPool) -> "Generator[None, None, _Below]":
        """What continues a block, the first in order first; under a tenant's eyes only what is its own or public."""
        best, num, last, more = list[_Child](), 0, None, True
        while more:
            blocks, last, more = index.continued(name, last, _BATCH)
            if not blocks:
                break
            than = best[-1][0] if len(best) == self._limit else _LEAST
            seen, found = self._better(blocks, than, pool)
            names = index.names([block for _, block in found])
            best += [(rank, name) for (rank, _), name in zip(found, names, strict=True)]
            if len(best) > 1:
                best = sorted(best, key=_rank, reverse=True)[: self._limit]
            num += seen
            self._spent += _BESIDE * len(blocks) + _BEST * len(found)
            if self._spent >= PORTION:
                yield
        if num > len(best):
            self.more = True
        return _Below(num, best)

    def _better(self, blocks: Sequence[BlockId], than: Rank, pool: BlockPool) -> tuple[int, list[tuple[Rank, BlockId]]]:
        """How many of these the view may show, and those of them that come before that place in its order."""
        num, public = 0, list[BlockId]()
        if self._owner not in (None, PUBLIC):
            public = pool.of_owner(blocks, PUBLIC)
            num = len(public)
        if self._owner is not None:
            blocks = pool.of_owner(blocks, self._owner)
        found = pool.hit_more(blocks, than) if self._order == "hits" else pool.used_later(blocks, than)
        return num + len(blocks), [((NEVER, NEVER), block) for block in public] + found


@dataclass(frozen=True, slots=True)
class _Below:
    """What continues a block."""

    num: int
    """All of it that may be seen."""
    best: "list[_Child]"
    """As much as can be shown."""


_Child = tuple[Rank, BlockHash]
"""Hits and when it was last used, what the order goes by first; and its name."""

_rank = itemgetter(0)
_LEAST: Rank = (-1.0, -1.0)

_Steps = Generator[None, None, None]
"""Stops after each portion."""
