"""Which owner gives up its next block; pure functions over counts.

Every owner is sure of a share of the pool: what it has published up to that share is never evicted for another.
Inside one owner the order is that of its shelf (see `blocks.BlockPool`): lower priority first, then what no later
request has matched, then least recently released; pinned blocks go when nobody has any other to spare. Owners without
a share are sure of nothing. Public blocks are evicted for nobody; an operator bounds them when marking them.
"""

from collections.abc import Mapping

from foreword.base.params import PRIORITY, Keep
from foreword.cache.blocks import PINNED, Shelf, Worth
from foreword.cache.expiry import NEVER
from foreword.cache.identity import PUBLIC

PUBLIC_WORTH = Worth(PINNED - 1, NEVER)
"""What all tenants share is nobody's to make cheap: no request's wishes change it."""


def worth(keep: Keep, default_ttl_s: float) -> Worth:
    """A request's wishes with the defaults filled in."""
    priority, ttl_s = keep.priority, keep.ttl_s
    return Worth(PRIORITY if priority is None else priority, default_ttl_s if ttl_s is None else ttl_s)


def named(keep: Keep) -> Worth:
    """Only what a request asks for by name; the rest raises nothing."""
    return Worth(-1 if keep.priority is None else keep.priority, -1.0 if keep.ttl_s is None else keep.ttl_s)


def spare(owner: str, shelf: Shelf, share: int, asking: str) -> int:
    """Cached blocks of `owner` that may be evicted for `asking`: its own ones all, others' beyond their share."""
    if owner == PUBLIC:
        return 0
    if owner == asking:
        return shelf.num_cached
    return max(0, min(shelf.num_cached, shelf.num_published - share))


def next_to_give(shelves: Mapping[str, Shelf], shares: Mapping[str, int], asking: str) -> tuple[Shelf, int] | None:
    """Whose turn it is to give a block to `asking`, and how many it gives before it can be another's turn.

    It is the owner furthest over its share among those with a block to spare, one that is not pinned if anybody has
    such. None: nobody has any. O(owners).
    """
    best, highest, second = None, (False, 0), None
    for owner, shelf in shelves.items():
        share = shares.get(owner, 0)
        if not spare(owner, shelf, share, asking):
            continue
        place = (shelf.has_unpinned, shelf.num_published - share)
        if best is None or place > highest:
            best, highest, second = shelf, place, None if best is None else highest
        elif second is None or place > second:
            second = place
    if best is None:
        return None
    most = min(spare(best.owner, best, shares.get(best.owner, 0), asking), best.num_alike)
    if second is not None and second[0] == highest[0]:
        most = min(most, max(1, highest[1] - second[1]))
    return best, most
