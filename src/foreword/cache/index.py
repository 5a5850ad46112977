r"""PrefixIndex: the tree of published blocks, keyed by chain hash.

                   root
                  /    \
               h0(A)   h0(B)        a node is one full block; its hash names all tokens before it as well,
                |                   so a path needs no token comparison and presence is closed towards
               h1(A)                the root: if a block is here, so are all blocks before it.
              /     \
          h2(A)    h2(A')

Only the way in, from a hash to its block, is a dictionary. All else about a block stands in lists, at the block's own
number: to follow a run of blocks, or to forget it, looks nothing up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, BlockId
from foreword.cache.identity import Content
from foreword.cache.siblings import Siblings

_NONE, _MANY = BlockId(-1), BlockId(-2)
_NAMELESS, _EMPTY = BlockHash(b""), Content((), b"")

_Place = int
"""A block, or behind all blocks a root."""


@dataclass(slots=True)
class Run:
    """Blocks that left together, each of which continued the one behind it: the last block of the prompt stands first.

    Whoever keeps it may take from its end what comes back.
    """

    parent: BlockHash
    """What the block at the end continued."""
    names: list[BlockHash]
    contents: list[Content]


class PrefixIndex:
    """Which published block has which hash, and how they hang together."""

    __slots__ = ("_blocks", "_contents", "_forks", "_names", "_next", "_num_blocks", "_parents", "_roots")

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: dict[BlockHash, BlockId] = {}
        self._names = [_NAMELESS] * num_blocks
        self._contents = [_EMPTY] * num_blocks
        self._parents: list[_Place] = [_NONE] * num_blocks
        self._next = [_NONE] * num_blocks
        # The one block that continues this place, _NONE, or _MANY: those are in _forks.
        self._forks: dict[_Place, Siblings] = {}
        self._roots: dict[BlockHash, _Place] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[BlockHash, BlockId]]:
        return iter(self._blocks.items())

    @property
    def roots(self) -> list[BlockHash]:
        """Where anything was ever published from."""
        return list(self._roots)

    def find(self, name: BlockHash) -> BlockId | None:
        """The block published under this hash, if any."""
        return self._blocks.get(name)

    def name_of(self, block: BlockId) -> BlockHash | None:
        """The hash under which a block is published, if it is."""
        return self._names[block] or None

    def names(self, blocks: Sequence[BlockId]) -> list[BlockHash]:
        """The hashes of blocks that are all published."""
        return list(map(self._names.__getitem__, blocks))

    def match(self, hashes: Sequence[BlockHash], limit: int) -> int:
        """How many of the first `limit` hashes are published: O(log limit), since presence is prefix-closed."""
        low, high = 0, min(limit, len(hashes))
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def blocks(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of hashes that are all published."""
        return list(map(self._blocks.__getitem__, hashes))

    def parent(self, name: BlockHash) -> BlockHash:
        """The hash that a published block continues; a root for a first block."""
        return self._names[self._parents[self._blocks[name]]]

    def content(self, block: BlockId) -> Content:
        """What a published block adds to its parent."""
        return self._contents[block]

    def path(self, name: BlockHash) -> list[BlockHash]:
        """A published block and all that it continues, the first block of the prompt first."""
        path, place = list[BlockHash](), self._blocks.get(name, self._num_blocks)
        while place < self._num_blocks:
            path.append(self._names[place])
            place = self._parents[place]
        return path[::-1]

    def below(self, block: BlockId) -> list[BlockId]:
        """A published block and all that continues it, each after the one that it continues."""
        order, todo = list[BlockId](), [block]
        while todo:
            block = todo.pop()
            order.append(block)
            todo += self._children(block)
        return order

    def children(self, name: BlockHash) -> list[BlockHash]:
        """The published blocks that continue this hash (or root)."""
        return self.names(list(self._children(self._place(name))))

    def run(self, block: BlockId, most: int) -> list[BlockId]:
        """The published blocks that continue this one, as long as one and no other does: at most so many."""
        found, following = list[BlockId](), self._next
        for _ in range(most):
            block = following[block]
            if block < 0:
                break
            found.append(block)
        return found

    def num_children(self, name: BlockHash) -> int:
        """How many published blocks continue this hash (or root)."""
        return len(self._children(self._place(name)))

    def continued(
        self, name: BlockHash, after: Content | None, most: int
    ) -> tuple[Sequence[BlockId], Content | None, bool]:
        """The next blocks that continue this hash (or root) in the order of what they add, behind `after` if given.

        `most` or a few more, with the content of the last, and whether there may be more.
        """
        children = self._children(self._place(name))
        if isinstance(children, Siblings):
            found, last = children.after(after, most)
            return found, last, len(found) >= most
        return [block for block in children if after is None or self._contents[block] > after], None, False

    def nearest(self, parent: BlockHash, content: Content) -> tuple[BlockHash, int] | None:
        """Among the children of `parent` with equal extras, one that begins most like `content`, and the tokens shared.

        O(log children).
        """
        children = self._children(self._place(parent))
        if isinstance(children, Siblings):
            near = children.beside(content)
        else:
            near = [(self._contents[block], block) for block in children]
        found = [
            (content.common_tokens(one), self._names[block]) for one, block in near if one.extras == content.extras
        ]
        if not found:
            return None
        common, name = max(found)
        return name, common

    def publish(self, name: BlockHash, parent: BlockHash, content: Content, block: BlockId) -> None:
        """Make a block findable. Its parent must be a root or published, and the hash must be new."""
        if name in self._blocks:
            raise InvariantBroken(f"hash {name.hex()[:12]} is published twice")
        place = self._place(parent)
        if place == _NONE:
            place = self._roots[parent] = len(self._names)
            self._names.append(parent)
            self._next.append(_NONE)
        self._blocks[name] = block
        self._names[block], self._contents[block], self._parents[block] = name, content, place
        before = self._next[place]
        if before == _NONE:
            self._next[place] = block
            return
        if before != _MANY:
            self._forks[place] = Siblings(self._contents[before], before)
            self._next[place] = _MANY
        self._forks[place].add(content, block)

    def drop(self, blocks: Sequence[BlockId]) -> list[Run]:
        """Forget published blocks, each after all that continues it. They come back as runs."""
        found, names, contents, parents = self._blocks, self._names, self._contents, self._parents
        following, runs, parent = self._next, list[Run](), _NONE
        run_names, run_contents = list[BlockHash](), list[Content]()
        for block in blocks:
            name, content = names[block], contents[block]
            if following[block] != _NONE or not name:
                raise InvariantBroken(f"block {block} is to be dropped but is not published or is continued")
            if block != parent:
                if runs:
                    runs[-1].parent = names[parent]
                run_names, run_contents = list[BlockHash](), list[Content]()
                runs.append(Run(name, run_names, run_contents))
            parent = parents[block]
            del found[name]
            run_names.append(name)
            run_contents.append(content)
            names[block], contents[block] = _NAMELESS, _EMPTY
            if following[parent] == block:
                following[parent] = _NONE
            else:
                self._part(parent, content)
        if runs:
            runs[-1].parent = names[parent]
        return runs

    def _part(self, parent: _Place, content: Content) -> None:
        """One of several that continue a place leaves."""
        siblings = self._forks[parent]
        siblings.remove(content)
        if len(siblings) == 1:
            self._next[parent] = next(iter(siblings))
            del self._forks[parent]

    def _place(self, name: BlockHash) -> _Place:
        place = self._blocks.get(name)
        return self._roots.get(name, _NONE) if place is None else place

    def _children(self, place: _Place) -> Siblings | Sequence[BlockId]:
        following = _NONE if place == _NONE else self._next[place]
        if following == _MANY:
            return self._forks[place]
        return () if following == _NONE else (following,)
