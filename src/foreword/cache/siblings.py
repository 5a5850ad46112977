"""Siblings: blocks that continue the same one, in the order of what they add, however many they are."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockId
from foreword.cache.identity import Content

_MOST = 256
"""Of a sorted list: to put something into one, or take it out, moves all behind it."""

_first = itemgetter(0)


class Siblings:
    """Contents and their blocks, sorted by content in lists of bounded length: to add or remove one is O(log n).

    Of all contents, one of the two neighbours of a given one in that order has the longest common beginning with it.
    """

    __slots__ = ("_blocks", "_contents", "_num")

    def __init__(self, content: Content, block: BlockId) -> None:
        self._contents = [[content]]
        self._blocks = [[block]]
        self._num = 1

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[BlockId]:
        return (block for blocks in self._blocks for block in blocks)

    def add(self, content: Content, block: BlockId) -> None:
        """Take one in."""
        i, place = self._place(content)
        contents, blocks = self._contents[i], self._blocks[i]
        contents.insert(place, content)
        blocks.insert(place, block)
        self._num += 1
        if len(contents) > _MOST:
            half = len(contents) // 2
            self._contents[i : i + 1] = [contents[:half], contents[half:]]
            self._blocks[i : i + 1] = [blocks[:half], blocks[half:]]

    def remove(self, content: Content) -> None:
        """Let one go."""
        i, place = self._place(content)
        contents, blocks = self._contents[i], self._blocks[i]
        if place == len(contents) or contents[place] != content:
            raise InvariantBroken("a block is to leave those beside it and is not among them")
        del contents[place], blocks[place]
        self._num -= 1
        if not contents:
            del self._contents[i], self._blocks[i]

    def beside(self, content: Content) -> list[tuple[Content, BlockId]]:
        """The two between which this content stands or would stand; fewer at an end."""
        i, place = self._place(content)
        contents, blocks = self._contents[i], self._blocks[i]
        near = list(zip(contents[max(0, place - 1) : place + 1], blocks[max(0, place - 1) : place + 1], strict=True))
        if place == len(contents) and i + 1 < len(self._contents):
            near.append((self._contents[i + 1][0], self._blocks[i + 1][0]))
        return near

    def after(self, content: Content | None, most: int) -> tuple[Sequence[BlockId], Content | None]:
        """Blocks behind this content, `most` or a few more, and the content of the last; None: from the first on."""
        i, found, last = 0, list[BlockId](), content
        if content is not None:
            i, _ = self._place(content)
            place = bisect_right(self._contents[i], content)
            found, last, i = self._blocks[i][place:], self._contents[i][-1], i + 1
        while len(found) < most and i < len(self._blocks):
            found, last, i = found + self._blocks[i], self._contents[i][-1], i + 1
        return found, last

    def _place(self, content: Content) -> tuple[int, int]:
        """The list that has this content, or in which it belongs, and where in it."""
        i = max(0, bisect_right(self._contents, content, key=_first) - 1)
        return i, bisect_left(self._contents[i], content)
