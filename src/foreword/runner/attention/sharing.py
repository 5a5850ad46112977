"""Which sequences of a step are attended together over the blocks that they share: integers only.

Sequences whose block tables begin with the same blocks read the same keys. Read once for all of them, as one dense
product, those keys cost one sequence's memory traffic instead of many; each sequence then attends to the rest of its
keys alone, and both results are merged by their log-sum-exp. `find_groups` says for whom that pays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LEAST_SAVED = 8192
"""Keys that need not be read again, per layer and KV head, before a group pays for its two more launches. At 128
dimensions and 8 KV heads that is 32 MB, about as long as a launch takes; not measured yet."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """One sequence of a step, as far as sharing goes."""

    blocks: tuple[int, ...]
    """Block table from position 0 on."""
    usable: int
    """Leading blocks that all of its rows see whole, so that nothing in them has to be masked."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend together to their first blocks."""

    members: tuple[int, ...]
    """Indices of sharers, rising; at least two."""
    num_blocks: int
    """Leading blocks that all of them hold."""

    @property
    def saved(self) -> int:
        """Blocks that are not read again."""
        return (len(self.members) - 1) * self.num_blocks


def find_groups(sharers: Sequence[Sharer], block_size: int, least_saved: int = LEAST_SAVED) -> tuple[Group, ...]:
    """Groups that together save at least as much as the best single one, each of them `least_saved` keys or more.

    A sharer is in one group at most. Not always the best choice of groups: that would cost more to find than it saves.
    """
    least = -(-least_saved // block_size)
    found: list[Group] = []
    for members in _by_block(sharers, range(len(sharers)), 0):
        found += _best(sharers, members, 0, least)
    return tuple(sorted(found, key=lambda group: group.members))


def _best(sharers: Sequence[Sharer], members: list[int], depth: int, least: int) -> list[Group]:
    """The best groups among members whose first `depth` blocks are the same: all of them, or smaller, deeper ones."""
    if len(members) < 2:
        return []
    first = sharers[members[0]]
    common = min(_common(first, sharers[member], depth) for member in members[1:])
    whole = Group(tuple(members), common)
    parts: list[Group] = []
    for branch in _by_block(sharers, members, common):
        parts += _best(sharers, branch, common, least)
    taken = {member for part in parts for member in part.members}
    rest = Group(tuple(member for member in members if member not in taken), common)
    if rest.saved >= max(least, 1):
        parts.append(rest)
    return [whole] if whole.saved >= max(least, 1, sum(part.saved for part in parts)) else parts


def _by_block(sharers: Sequence[Sharer], members: Sequence[int], depth: int) -> Iterator[list[int]]:
    """Part members by their block at `depth`, leaving out those that have none to share there."""
    branches: dict[int, list[int]] = {}
    for member in members:
        sharer = sharers[member]
        if sharer.usable > depth:
            branches.setdefault(sharer.blocks[depth], []).append(member)
    return (branch for branch in branches.values() if len(branch) > 1)


def _common(one: Sharer, other: Sharer, depth: int) -> int:
    """How many leading usable blocks are the same, given that the first `depth` are.

    A block stands for everything before it, so as a rule equal blocks have equal predecessors and bisection finds the
    end. The exception, a private copy of a shared block, shows when the run is compared, and is then found one by one.
    """
    low, high = depth, min(one.usable, other.usable)
    while low < high:
        middle = (low + high + 1) // 2
        if one.blocks[middle - 1] == other.blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    if one.blocks[depth:low] == other.blocks[depth:low]:
        return low
    pairs = zip(one.blocks[depth:low], other.blocks[depth:low], strict=True)
    return depth + next(i for i, (a, b) in enumerate(pairs) if a != b)
