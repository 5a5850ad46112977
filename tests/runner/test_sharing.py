"""Who attends together to what: pure integers."""

import itertools
import random

import pytest

from foreword.runner.attention.sharing import LEAST_SAVED, Group, Sharer, find_groups

SIZE = 16


def sharer(*blocks: int, usable: int | None = None) -> Sharer:
    return Sharer(blocks, len(blocks) if usable is None else usable)


def groups(*sharers: Sharer, least: int = 1) -> tuple[Group, ...]:
    return find_groups(sharers, SIZE, least)


def test_a_common_head_is_shared_and_the_rest_is_not() -> None:
    assert groups(sharer(1, 2, 3, 4), sharer(1, 2, 3, 5), sharer(1, 2, 3)) == (Group((0, 1, 2), 3),)


def test_strangers_share_nothing() -> None:
    assert groups(sharer(1, 2), sharer(3, 4), sharer(5)) == ()
    assert groups() == ()
    assert groups(sharer(1, 2)) == ()


def test_only_blocks_that_all_rows_see_whole() -> None:
    assert groups(sharer(1, 2, 3), sharer(1, 2, 3, usable=1)) == (Group((0, 1), 1),)
    assert groups(sharer(1, 2, 3), sharer(1, 2, 3, usable=0)) == ()


def test_the_larger_saving_wins() -> None:
    deep = [sharer(1, *range(10, 20), 100 + i) for i in range(3)]
    shallow = [sharer(1, 30 + i) for i in range(2)]
    found = groups(*deep, *shallow)
    assert found == (Group((0, 1, 2), 11), Group((3, 4), 1)), "4 saved for all are less than 22 for three"
    wide = [sharer(1, 2, 50 + i) for i in range(20)]
    assert groups(*wide[:2], sharer(1, 2, 50)) == (Group((0, 1, 2), 2),)
    many = groups(*(sharer(1, 2, 3, 9 if i < 2 else 10 + i) for i in range(20)))
    assert many == (Group(tuple(range(20)), 3),), "one deeper block for two is less than three for all"


def test_who_is_left_may_share_less() -> None:
    deep = [sharer(1, *range(10, 30), 100 + i) for i in range(2)]
    shallow = [sharer(1, 2, 3, 30 + i) for i in range(3)]
    assert groups(*deep, *shallow) == (Group((0, 1), 21), Group((2, 3, 4), 3))


def test_two_heads_are_two_groups() -> None:
    assert groups(sharer(1, 2, 7), sharer(3, 4, 8), sharer(1, 2, 9), sharer(3, 4, 6)) == (
        Group((0, 2), 2),
        Group((1, 3), 2),
    )


def test_a_group_has_to_pay() -> None:
    pair = (sharer(*range(10), 98), sharer(*range(10), 99))
    assert groups(*pair, least=10 * SIZE) == (Group((0, 1), 10),)
    assert groups(*pair, least=10 * SIZE + 1) == ()
    assert find_groups(pair, SIZE) == ()
    head = range(LEAST_SAVED // SIZE)
    assert len(find_groups([sharer(*head, -1), sharer(*head, -2)], SIZE)) == 1


def test_a_private_copy_ends_what_is_shared() -> None:
    """A later block may be the same although an earlier one is somebody's own copy."""
    assert groups(sharer(1, 2, 3, 4, 5), sharer(1, 9, 3, 4, 5)) == (Group((0, 1), 1),)


def best_single(sharers: list[Sharer]) -> int:
    """The most blocks that any one group saves."""
    saved = 0
    for one in sharers:
        for depth in range(1, one.usable + 1):
            alike = [other for other in sharers if other.usable >= depth and other.blocks[:depth] == one.blocks[:depth]]
            saved = max(saved, (len(alike) - 1) * depth)
    return saved


@pytest.mark.parametrize("seed", range(60))
def test_no_single_group_saves_more(seed: int) -> None:
    source = random.Random(seed)
    trees: list[tuple[int, ...]] = [()]
    fresh = itertools.count()
    while len(trees) < 8:
        base = source.choice(trees)
        trees.append((*base, *(next(fresh) for _ in range(source.randrange(1, 4)))))
    sharers = [sharer(*blocks, usable=source.randrange(len(blocks) + 1)) for blocks in source.choices(trees, k=6)]
    found = groups(*sharers)
    members = [member for group in found for member in group.members]
    assert len(members) == len(set(members))
    for group in found:
        heads = {sharers[m].blocks[: group.num_blocks] for m in group.members}
        assert len(heads) == 1
        assert all(sharers[m].usable >= group.num_blocks for m in group.members)
    assert sum(group.saved for group in found) >= best_single(sharers)
