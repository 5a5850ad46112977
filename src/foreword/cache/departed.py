"""Departed: what left the cache lately, and why; so that a miss can say what happened to what it misses.

Bounded: some tens of thousands of single blocks, oldest forgotten first, and the two last trees that were flushed as a
whole (each no larger than the pool was). A block costs three dictionary entries when it leaves.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from foreword.base.ids import BlockHash
from foreword.cache.identity import Chain, Content
from foreword.cache.index import PrefixIndex

Cause = Literal["pressure", "quota", "expired", "flushed", "audit"]
"""Why a block left: its owner needed the room; another tenant did, and the owner was over its share; its time was up;
somebody said so; an audit found it wrong."""

_REMEMBERED = 65_536
_K = TypeVar("_K")
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """A dictionary that remembers at least the last half of `most` entries, and forgets in bulk: O(1) each."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._young: dict[_K, _V] = {}
        self._old: dict[_K, _V] = {}

    def put(self, key: _K, value: _V) -> None:
        """Remember."""
        self._young[key] = value
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}

    def forget(self, key: _K) -> None:
        """Remember no longer."""
        self._young.pop(key, None)
        self._old.pop(key, None)

    def get(self, key: _K) -> _V | None:
        """What was put last under this key, unless it is forgotten."""
        found = self._young.get(key)
        return self._old.get(key) if found is None else found


@dataclass(frozen=True, slots=True)
class Left:
    """How a block left."""

    cause: Cause
    moment_s: float
    """When, on the engine's clock."""


@dataclass(frozen=True, slots=True, eq=False)
class _Elsewhere:
    """A flushed tree, seen from a chain with another root, whose hashes say nothing about it.

    So blocks are paired while they are published, each behind its parent's pair: O(1) for each, and none to be followed
    when somebody asks.
    """

    tree: PrefixIndex
    root: BlockHash
    twins: dict[BlockHash, BlockHash]
    """Published since -> of this tree, with the same tokens and extras from the beginning on."""

    def pair(self, chain: Chain, block: int) -> None:
        near = self._near(chain, block)
        if near is not None and near[1] == chain.block_size:
            self.twins[chain.hashes[block]] = near[0]

    def common_tokens(self, chain: Chain, block: int) -> int:
        """Tokens of block number `block` that this tree has, if it has all before it; those were published since."""
        near = self._near(chain, block)
        return 0 if near is None else near[1]

    def _near(self, chain: Chain, block: int) -> tuple[BlockHash, int] | None:
        parent = self.twins.get(chain.parent(block)) if block else self.root
        return None if parent is None else self.tree.nearest(parent, chain.content(block))


class Departed:
    """Remembers what left. Knows no tenant: hashes and contents of one are none of another's."""

    __slots__ = (
        "_children",
        "_contents",
        "_counts",
        "_elsewhere",
        "_latest",
        "_left",
        "_trees",
        "_unstored",
        "_unstored_children",
    )

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._left: Recent[BlockHash, Left] = Recent(most)
        self._contents: Recent[BlockHash, Content] = Recent(most)
        self._children: Recent[BlockHash, BlockHash] = Recent(most)
        # By parent, the last one that left: for a prompt that ends inside the block and has no hash of it.
        self._unstored: Recent[BlockHash, bool] = Recent(most)
        self._unstored_children: Recent[BlockHash, Content] = Recent(most)
        self._trees: deque[tuple[PrefixIndex, float]] = deque(maxlen=2)
        self._elsewhere: list[_Elsewhere] = []
        self._counts: Counter[Cause] = Counter(dict.fromkeys(get_args(Cause), 0))
        self._latest = Left("flushed", 0.0)

    @property
    def counts(self) -> Mapping[Cause, int]:
        """Blocks that left so far, by cause. Safe to read from any thread."""
        return self._counts

    def note(self, name: BlockHash, parent: BlockHash, content: Content, cause: Cause, now: float) -> None:
        """A block left."""
        left = self._latest
        if left.cause != cause or left.moment_s != now:
            left = self._latest = Left(cause, now)
        self._left.put(name, left)
        # No new object for each: they would wake the garbage collector in the middle of a step.
        self._contents.put(name, content)
        self._children.put(parent, name)
        self._counts[cause] += 1

    def note_tree(self, tree: PrefixIndex, now: float) -> None:
        """Everything left at once; `tree` is ours from here on."""
        if len(tree):
            for name, _ in tree:
                self._left.forget(name)  # how it left before it came back
            self._trees.append((tree, now))
            kept = [other for other in self._elsewhere if any(other.tree is known for known, _ in self._trees)]
            self._elsewhere = [*kept, *(_Elsewhere(tree, root, {}) for root in tree.roots)]
            self._counts["flushed"] += len(tree)

    def note_unstored(self, name: BlockHash, parent: BlockHash, content: Content) -> None:
        """A block was computed, and its request wanted it not to be stored."""
        self._unstored.put(name, True)
        self._unstored_children.put(parent, content)

    def how(self, name: BlockHash) -> Left | None:
        """How this block left, if it did."""
        left = self._left.get(name)
        if left is None:
            moments = [moment for tree, moment in self._trees if tree.find(name) is not None]
            left = Left("flushed", moments[-1]) if moments else None
        return left

    def how_one_like(self, chain: Chain, block: int, matched_tokens: int) -> Left | None:
        """How another one left that would have matched more than `matched_tokens` tokens of block number `block`."""
        parent, content = chain.parent(block), chain.content(block)
        child = self._children.get(parent)
        known = None if child is None else self._contents.get(child)
        if child is not None and known is not None and known.common_tokens(content) > matched_tokens:
            return self.how(child)
        for tree, _ in self._trees:
            near = tree.nearest(parent, content)
            if near is not None and near[1] > matched_tokens:
                return self.how(near[0])
        return None

    def is_unstored(self, name: BlockHash) -> bool:
        """Whether this block was computed lately without being stored."""
        return self._unstored.get(name) is not None

    def is_one_like_unstored(self, chain: Chain, block: int, matched_tokens: int) -> bool:
        """Whether another one was that would have matched more than `matched_tokens` tokens of block number `block`."""
        child = self._unstored_children.get(chain.parent(block))
        return child is not None and child.common_tokens(chain.content(block)) > matched_tokens

    def had_elsewhere(self, chain: Chain, block: int, matched_tokens: int) -> bool:
        """Whether a tree of another model state went on like this chain, to more than `matched_tokens` of `block`."""
        return any(
            other.root != chain.root and other.common_tokens(chain, block) > matched_tokens for other in self._elsewhere
        )

    def note_published(self, chain: Chain, block: int) -> None:
        """Block number `block` of this chain was published; those before it are."""
        for other in self._elsewhere:
            if other.root != chain.root:
                other.pair(chain, block)
