"""The tree against a naive one: random publishing and dropping, forks of any size, what is nearest, what is a run."""

from random import Random

import pytest

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, BlockId
from foreword.cache.identity import Content
from foreword.cache.index import PrefixIndex
from foreword.cache.siblings import Siblings

NUM = 600
ROOT = BlockHash(b"root")


def content(*tokens: int, extras: tuple[bytes, ...] = ()) -> Content:
    return Content(extras, b"".join(token.to_bytes(4, "little") for token in tokens))


class Both:
    """An index, and what is in it as a dictionary: name -> (parent, content, block)."""

    def __init__(self) -> None:
        self.index = PrefixIndex(NUM)
        self.naive: dict[BlockHash, tuple[BlockHash, Content, BlockId]] = {}
        self.free = [BlockId(i) for i in range(NUM)]

    def publish(self, parent: BlockHash, added: Content) -> BlockHash:
        name = BlockHash(parent + repr(added).encode())
        if name not in self.naive:
            block = self.free.pop()
            self.index.publish(name, parent, added, block)
            self.naive[name] = parent, added, block
        return name

    def children(self, name: BlockHash) -> list[BlockHash]:
        return [child for child, (parent, _, _) in self.naive.items() if parent == name]

    def drop(self, name: BlockHash) -> None:
        """A block and all that continues it, in one go; what comes back must be all of it, each behind its child."""
        blocks = self.index.below(self.naive[name][2])[::-1]
        runs = self.index.drop(blocks)
        dropped = [one for run in runs for one in run.names]
        assert len(dropped) == len(blocks)
        for run in runs:
            for i, one in enumerate(run.names):
                parent, added, block = self.naive.pop(one)
                assert parent == (run.names[i + 1] if i + 1 < len(run.names) else run.parent)
                assert added == run.contents[i]
                self.free.append(block)
        assert name == dropped[-1]

    def check(self) -> None:
        index = self.index
        assert dict(index) == {name: block for name, (_, _, block) in self.naive.items()}
        for name, (parent, added, block) in self.naive.items():
            assert (index.parent(name), index.content(block), index.name_of(block)) == (parent, added, name)
        assert all(index.name_of(block) is None for block in self.free)
        for name in (ROOT, *self.naive):
            assert sorted(index.children(name)) == sorted(self.children(name))
            assert index.num_children(name) == len(self.children(name))

    def check_run(self, name: BlockHash, most: int) -> None:
        run, step = list[BlockHash](), name
        while len(children := self.children(step)) == 1 and len(run) < most:
            step = children[0]
            run.append(step)
        assert self.index.names(self.index.run(self.naive[name][2], most)) == run

    def check_nearest(self, parent: BlockHash, asked: Content) -> None:
        found = self.index.nearest(parent, asked)
        common = [
            self.naive[child][1].common_tokens(asked)
            for child in self.children(parent)
            if self.naive[child][1].extras == asked.extras
        ]
        assert (None if found is None else found[1]) == max(common, default=None)
        if found is not None:
            assert self.naive[found[0]][1].common_tokens(asked) == found[1]

    def check_portions(self, parent: BlockHash, most: int) -> None:
        seen, last, more = list[BlockId](), None, True
        while more:
            blocks, last, more = self.index.continued(parent, last, most)
            seen += blocks
        assert sorted(self.index.names(seen)) == sorted(self.children(parent))


@pytest.mark.parametrize("width", [2, 9, 400])
@pytest.mark.parametrize("seed", range(4))
def test_the_tree_is_that_of_a_naive_one(seed: int, width: int) -> None:
    draw, both = Random(seed), Both()

    def some() -> Content:
        return content(draw.randrange(width), draw.randrange(2), extras=(b"salt",) * draw.choice([0, 0, 1]))

    for turn in range(1_500):
        names = [ROOT, *both.naive]
        if not both.free or (both.naive and draw.random() < 0.05):
            both.drop(draw.choice(names[1:]))
        else:
            both.publish(draw.choice([ROOT, names[-1], draw.choice(names)]), some())
        if turn % 50 == 0:
            both.check()
            for parent in {ROOT, draw.choice(names)} & {ROOT, *both.naive}:
                both.check_nearest(parent, some())
                both.check_portions(parent, draw.choice([1, 10, 1000]))
            for name in draw.sample(sorted(both.naive), min(3, len(both.naive))):
                both.check_run(name, draw.choice([1, 1000]))
    both.check()


def test_only_leaves_can_be_dropped_and_only_once() -> None:
    both = Both()
    first = both.publish(ROOT, content(1))
    last = both.publish(first, content(2))
    with pytest.raises(InvariantBroken):
        both.index.drop(both.index.blocks([first]))
    blocks = both.index.blocks([last, first])
    both.index.drop(blocks)
    assert len(both.index) == 0
    with pytest.raises(InvariantBroken):
        both.index.drop(blocks[:1])


def test_of_those_beside_each_other_none_that_stays_is_left_out_while_others_come_and_go() -> None:
    draw = Random(5)
    staying = {content(3 * i): BlockId(3 * i) for i in range(2_000)}
    leaving = [content(3 * i + 1) for i in range(2_000)]
    siblings = Siblings(content(0), BlockId(0))
    for one in draw.sample(list(staying)[1:], 1_999):
        siblings.add(one, staying[one])
    for one in leaving:
        siblings.add(one, BlockId(9_000))
    seen, last = list[BlockId](), None
    while True:
        found, last = siblings.after(last, 200)
        if not found:
            break
        seen += found
        for _ in range(100):
            if leaving:
                siblings.remove(leaving.pop(draw.randrange(len(leaving))))
            siblings.add(content(draw.randrange(2**32), 7), BlockId(9_001))
    kept = [block for block in seen if block < 9_000]
    assert sorted(kept) == sorted(staying.values())
    assert len(siblings) == len(list(siblings))
    with pytest.raises(InvariantBroken):
        siblings.remove(content(1, 1, 1))
