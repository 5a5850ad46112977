r"""PrefixIndex: the tree of published blocks, keyed by chain hash.

                   root
                  /    \
               h0(A)   h0(B)        a node is one full block; its hash names all tokens before it as well,
                |                   so a path needs no token comparison and presence is closed towards
               h1(A)                the root: if a block is here, so are all blocks before it.
              /     \
          h2(A)    h2(A')
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, BlockId
from foreword.cache.identity import Content


class PrefixIndex:
    """Which published block has which hash, and how they hang together."""

    __slots__ = ("_blocks", "_children", "_contents", "_parents", "roots")

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, BlockId] = {}
        self._parents: dict[BlockHash, BlockHash] = {}
        self._contents: dict[BlockHash, Content] = {}
        self._children: dict[BlockHash, list[tuple[Content, BlockHash]]] = {}
        # Children are kept sorted by content: of all contents, one of the two neighbours of a given one in that
        # order has the longest common beginning with it.
        self.roots: set[BlockHash] = set()
        """Where anything was ever published from."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[BlockHash, BlockId]]:
        return iter(self._blocks.items())

    def find(self, name: BlockHash) -> BlockId | None:
        """The block published under this hash, if any."""
        return self._blocks.get(name)

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
        return self._parents[name]

    def content(self, name: BlockHash) -> Content:
        """What a published block adds to its parent."""
        return self._contents[name]

    def path(self, name: BlockHash) -> list[BlockHash]:
        """A published block and all that it continues, the first block of the prompt first."""
        path = list[BlockHash]()
        while name in self._blocks:
            path.append(name)
            name = self._parents[name]
        return path[::-1]

    def below(self, name: BlockHash) -> list[BlockHash]:
        """A published block and all that continues it, each after the one that it continues."""
        order, todo = list[BlockHash](), [name]
        while todo:
            name = todo.pop()
            if name in self._blocks:
                order.append(name)
                todo += self.children(name)
        return order

    def children(self, name: BlockHash) -> list[BlockHash]:
        """The published blocks that continue this hash (or root)."""
        return [child for _, child in self._children.get(name, ())]

    def run(self, name: BlockHash, most: int) -> tuple[list[BlockHash], list[BlockId]]:
        """The published blocks that continue this one, as long as one and no other does: at most so many."""
        names, found = list[BlockHash](), list[BlockId]()
        children, blocks = self._children, self._blocks
        while len(found) < most:
            siblings = children.get(name)
            if siblings is None or len(siblings) != 1:
                break
            name = siblings[0][1]
            names.append(name)
            found.append(blocks[name])
        return names, found

    def num_children(self, name: BlockHash) -> int:
        """How many published blocks continue this hash (or root)."""
        return len(self._children.get(name, ()))

    def continued(self, name: BlockHash, start: int, stop: int) -> tuple[list[BlockHash], list[BlockId]]:
        """Those from number `start` on and before `stop`."""
        names = [child for _, child in self._children.get(name, ())[start:stop]]
        return names, self.blocks(names)

    def nearest(self, parent: BlockHash, content: Content) -> tuple[BlockHash, int] | None:
        """Among the children of `parent` with equal extras, one that begins most like `content`, and the tokens shared.

        O(log children).
        """
        siblings = self._children.get(parent)
        if siblings is None:
            return None
        place = bisect_left(siblings, (content,))
        near = [one for one in siblings[max(0, place - 1) : place + 1] if one[0].extras == content.extras]
        if not near:
            return None
        common, name = max((content.common_tokens(other), name) for other, name in near)
        return name, common

    def publish(self, name: BlockHash, parent: BlockHash, content: Content, block: BlockId) -> None:
        """Make a block findable. Its parent must be a root or published, and the hash must be new."""
        if name in self._blocks:
            raise InvariantBroken(f"hash {name.hex()[:12]} is published twice")
        self._blocks[name] = block
        self._parents[name] = parent
        self._contents[name] = content
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = [(content, name)]
            if parent not in self._blocks:
                self.roots.add(parent)
        else:
            insort(siblings, (content, name))

    def drop(self, name: BlockHash) -> tuple[BlockId, BlockHash, Content]:
        """Forget a leaf: its block, what it continued, and what it added."""
        if name in self._children:
            raise InvariantBroken(f"hash {name.hex()[:12]} is to be dropped but published blocks continue it")
        parent, content = self._parents.pop(name), self._contents.pop(name)
        siblings = self._children[parent]
        del siblings[bisect_left(siblings, (content, name))]
        if not siblings:
            del self._children[parent]
        return self._blocks.pop(name), parent, content
