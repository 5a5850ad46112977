"""Departed: what left the cache lately, and why; so that a miss can say what happened to what it misses.

Bounded: some tens of thousands of single blocks, oldest forgotten first, and the two last trees that were flushed as a
whole (each no larger than the pool was). Blocks that leave together hang one below the other, as a rule, and are
remembered as one run, by the block that must come back before any other of it can be asked for.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from foreword.base.ids import BlockHash
from foreword.cache.identity import Chain, Content
from foreword.cache.index import PrefixIndex, Run

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


class _Gone(NamedTuple):
    """A run that left, less what has come back of it since."""

    run: Run
    left: Left


class _Stretch:
    """Runs that left one after the other."""

    __slots__ = ("below", "num_blocks", "runs")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.runs: dict[BlockHash, _Gone] = {}
        """By the block that comes back first."""
        self.below: dict[BlockHash, _Gone] = {}
        """By what that one continues, the last one that left there: for a prompt that ends inside the block and has no
        hash of it. What has come back since is in it too, until it is asked for."""

    def note(self, gone: _Gone) -> None:
        """A run left."""
        run = gone.run
        self.num_blocks += len(run.names)
        self.runs[run.names[-1]] = self.below[run.parent] = gone

    def note_back(self, name: BlockHash) -> None:
        """The first block of a run is here again."""
        gone = self.runs.pop(name)
        run = gone.run
        run.parent = run.names.pop()
        run.contents.pop()
        if run.names:
            self.runs[run.names[-1]] = self.below[name] = gone

    def one_below(self, parent: BlockHash) -> tuple[Content, Left] | None:
        """What the last block added that left below this one, and how it left."""
        gone = self.below.get(parent)
        if gone is None or gone.run.parent != parent or not gone.run.contents:
            return None
        return gone.run.contents[-1], gone.left


class Departed:
    """Remembers what left. Knows no tenant: hashes and contents of one are none of another's."""

    __slots__ = (
        "_counts",
        "_elsewhere",
        "_half",
        "_latest",
        "_old",
        "_trees",
        "_unstored",
        "_unstored_children",
        "_young",
    )

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._half = most // 2
        self._young, self._old = _Stretch(), _Stretch()
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

    def note(self, runs: Iterable[Run], cause: Cause, now: float) -> None:
        """Blocks left. Forgets in bulk: O(1) each."""
        left = self._latest
        if left.cause != cause or left.moment_s != now:
            left = self._latest = Left(cause, now)
        for run in runs:
            self._counts[cause] += len(run.names)
            self._young.note(_Gone(run, left))
            if self._young.num_blocks >= self._half:
                self._old, self._young = self._young, _Stretch()

    def note_tree(self, tree: PrefixIndex, now: float) -> None:
        """Everything left at once; `tree` is ours from here on."""
        if len(tree):
            self._trees.append((tree, now))
            kept = [other for other in self._elsewhere if any(other.tree is known for known, _ in self._trees)]
            self._elsewhere = [*kept, *(_Elsewhere(tree, root, {}) for root in tree.roots)]
            self._counts["flushed"] += len(tree)

    def note_unstored(self, name: BlockHash, parent: BlockHash, content: Content) -> None:
        """A block was computed, and its request wanted it not to be stored."""
        self._unstored.put(name, True)
        self._unstored_children.put(parent, content)

    def how(self, name: BlockHash) -> Left | None:
        """How this block left, if it did; what it continues is here."""
        gone = self._young.runs.get(name) or self._old.runs.get(name)
        if gone is not None:
            return gone.left
        moments = [moment for tree, moment in self._trees if tree.find(name) is not None]
        return Left("flushed", moments[-1]) if moments else None

    def how_one_like(self, chain: Chain, block: int, matched_tokens: int) -> Left | None:
        """How another one left that would have matched more than `matched_tokens` tokens of block number `block`."""
        parent, content = chain.parent(block), chain.content(block)
        known = self._young.one_below(parent) or self._old.one_below(parent)
        if known is not None and known[0].common_tokens(content) > matched_tokens:
            return known[1]
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
        name = chain.hashes[block]
        for stretch in (self._young, self._old):
            if name in stretch.runs:
                stretch.note_back(name)
                break
        for other in self._elsewhere:
            if other.root != chain.root:
                other.pair(chain, block)
