"""Which owner gives up its oldest block next; pure functions over counts.

Every owner is sure of a share of the pool: what it has published up to that share is never evicted for another.
Inside one owner the order is least recently released first (see `blocks.BlockPool`). Owners without a share are sure of
nothing. Public blocks are evicted for nobody; an operator bounds them when marking them.
"""

from collections.abc import Mapping

from foreword.cache.blocks import Shelf
from foreword.cache.identity import PUBLIC


def spare(owner: str, shelf: Shelf, share: int, asking: str) -> int:
    """Cached blocks of `owner` that may be evicted for `asking`: its own ones all, others' beyond their share."""
    if owner == PUBLIC:
        return 0
    if owner == asking:
        return len(shelf.cached)
    return max(0, min(len(shelf.cached), shelf.num_published - share))


def most_over_share(shelves: Mapping[str, Shelf], shares: Mapping[str, int], asking: str) -> str | None:
    """The owner that is furthest over its share and has a block to spare for `asking`. None: nobody has. O(owners)."""
    best, worst = None, 0
    for owner, shelf in shelves.items():
        share = shares.get(owner, 0)
        if spare(owner, shelf, share, asking) and (best is None or shelf.num_published - share > worst):
            best, worst = owner, shelf.num_published - share
    return best
