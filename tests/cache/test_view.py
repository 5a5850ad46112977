"""Looking at the tree: in one order or the other, in portions that no step waits long for, whatever its shape."""

import random

import pytest

from foreword.base.params import EVERYTHING
from foreword.cache.expiry import NEVER
from foreword.cache.identity import Chain, Space, Tenant, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.cache.view import PORTION, Walk

BLOCK = 4
SPACE = Space(root({"weights": "w"}, BLOCK), BLOCK)


def run(cache: PrefixCache, tokens: list[int], times: int = 1) -> None:
    for _ in range(times):
        chain = Chain(SPACE, tokens)
        lease = cache.acquire(chain, EVERYTHING)
        cache.count_hit(lease)
        assert cache.reserve(lease, lease.matched_tokens, len(chain)) is not None
        cache.publish(lease, chain, len(chain))
        cache.release(lease)


def looked(cache: PrefixCache, walk: Walk) -> list[int]:
    """What each portion looked at."""
    spent = list[int]()
    more = True
    while more:
        more = cache.look(walk)
        spent.append(walk.spent)
    return spent


def test_the_order_of_hits_is_that_of_the_whole_tree() -> None:
    cache, rng = PrefixCache(4_000, BLOCK), random.Random(3)
    for head in range(12):
        for _ in range(rng.randrange(1, 9)):
            run(cache, [head] * 8 + [rng.randrange(2)] * 8 + [1], rng.randrange(1, 4))
    all_nodes, top = Walk(limit=500, order="hits"), Walk(limit=5, order="hits")
    looked(cache, all_nodes)
    looked(cache, top)
    hits = [node.hits or 0 for node in all_nodes.nodes]
    assert hits == sorted(hits, reverse=True)
    assert len(set(hits)) > 5
    assert [node.hits for node in top.nodes] == hits[:5]
    assert top.more
    assert not all_nodes.more
    other = Walk(limit=500)
    looked(cache, other)
    assert {node.name for node in other.nodes} == {node.name for node in all_nodes.nodes}
    assert [node.name for node in other.nodes] != [node.name for node in all_nodes.nodes]


@pytest.mark.parametrize("order", ["used", "hits"])
@pytest.mark.parametrize("shape", ["one long prompt", "thousands of short ones", "a comb"])
def test_no_portion_is_long_whatever_the_tree_looks_like(shape: str, order: str) -> None:
    cache = PrefixCache(12_000, BLOCK)
    if shape == "one long prompt":
        run(cache, [i % 7 for i in range(40_000)])
    elif shape == "thousands of short ones":
        for i in range(10_000):
            run(cache, [i, 1, 2, 3, 4])
    else:
        trunk = [i % 5 for i in range(8_000)]
        run(cache, trunk)
        for i in range(0, 8_000, 8):
            run(cache, [*trunk[:i], *[9] * 9])
    walk = Walk(limit=50, order=order)  # pyright: ignore[reportArgumentType]
    spent = looked(cache, walk)
    assert max(spent) <= 2 * PORTION  # a batch goes beyond it at most
    assert len(walk.nodes) == (1 if shape == "one long prompt" else 50)
    assert walk.more == (shape != "one long prompt")
    if shape == "one long prompt":
        assert walk.nodes[0].num_blocks == 10_000
        assert len(spent) > 1


@pytest.mark.parametrize("seed", range(3))
def test_of_many_beside_each_other_the_view_shows_the_first_in_its_order(seed: int) -> None:
    cache, rng = PrefixCache(4_000, BLOCK), random.Random(seed)
    used, hits = dict[int, float](), dict[int, int]()
    for moment in range(3_000):
        cache.advance(moment)
        first = rng.choice([rng.randrange(20), rng.randrange(1_500)])
        run(cache, [first, 1, 2, 3, 4])
        hits[first] = hits[first] + 1 if first in hits else 0
        used[first] = moment
    held = [one for one in used if one % 40 == 0]
    leases = [cache.acquire(Chain(SPACE, [one, 1, 2, 3, 4]), EVERYTHING) for one in held]
    moments = {one: NEVER if one in held else used[one] for one in used}
    ranks = {"used": moments, "hits": {one: (hits[one], moments[one]) for one in used}}
    for order, rank in ranks.items():
        walk = Walk(limit=60, order=order)  # pyright: ignore[reportArgumentType]
        looked(cache, walk)
        shown = [node.begins[0] for node in walk.nodes]
        assert [rank[one] for one in shown] == sorted(rank.values(), reverse=True)[:60]
        assert len(set(shown)) == 60
        assert {node.begins[0] for node in walk.nodes if node.held} == set(held) & set(shown)
        assert walk.more
    for lease in leases:
        cache.release(lease)


def test_what_was_flushed_in_the_middle_of_a_view_is_not_shown_as_what_took_its_place() -> None:
    cache, many = PrefixCache(3_000, BLOCK), range(2_500)
    for i in many:
        run(cache, [i, 1, 2, 3, 4])
    walk = Walk(limit=400, owner="")
    assert cache.look(walk)
    cache.flush()
    tenant = Tenant.named("red")
    for i in many:
        lease = cache.acquire(chain := Chain(SPACE, [i, 1, 2, 3, 4], tenant=tenant), EVERYTHING)
        cache.reserve(lease, 0, len(chain))
        cache.publish(lease, chain, len(chain))
        cache.release(lease)
    looked(cache, walk)
    assert {node.owner for node in walk.nodes} <= {""}
    again = Walk(limit=400, owner="red")
    looked(cache, again)
    assert {node.owner for node in again.nodes} == {"red"}


def test_what_leaves_between_two_portions_is_left_out() -> None:
    cache = PrefixCache(12_000, BLOCK)
    run(cache, [i % 7 for i in range(40_000)])
    for i in range(3_000):
        run(cache, [50 + i, 1, 2, 3, 4])
    for portions in range(7):  # one more than there are
        walk = Walk(limit=400)
        for _ in range(portions):
            if not cache.look(walk):
                break
        cache.flush()
        looked(cache, walk)
        run(cache, [i % 7 for i in range(40_000)])
        for i in range(3_000):
            run(cache, [50 + i, 1, 2, 3, 4])
    assert looked(cache, Walk(limit=400))
