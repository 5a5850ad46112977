"""Lifetimes, priorities and pins by hand: the cases that people write into their settings."""

import pytest

from foreword.base.params import AS_USUAL, EVERYTHING, Keep
from foreword.cache.identity import PUBLIC, Chain, Space, Tenant, root
from foreword.cache.prefix_cache import PrefixCache

BLOCK = 4
PLAIN = Space(root({"weights": "w"}, BLOCK), BLOCK)
RED, BLUE = Tenant.named("red"), Tenant.named("blue")


def chain(first: int, blocks: int = 2, tenant: Tenant = RED) -> Chain:
    return Chain(PLAIN, [first] * (blocks * BLOCK + 1), tenant=tenant)


def run(cache: PrefixCache, tokens: Chain, keep: Keep = AS_USUAL) -> int:
    lease = cache.acquire(tokens, EVERYTHING, keep)
    assert cache.reserve(lease, lease.matched_tokens, len(tokens)) is not None
    cache.count_hit(lease)
    cache.publish(lease, tokens, len(tokens))
    cache.release(lease)
    return lease.matched_tokens


def found(cache: PrefixCache, tokens: Chain) -> int:
    return cache.find(tokens, EVERYTHING)[1]


def test_a_hit_begins_the_time_again_and_what_builds_on_a_block_keeps_it() -> None:
    cache = PrefixCache(16, BLOCK)
    run(cache, chain(1), Keep(ttl_s=2))
    run(cache, chain(2), Keep(ttl_s=2))
    cache.advance(1)
    assert run(cache, chain(1)) == 8
    cache.advance(2)
    assert (found(cache, chain(1)), found(cache, chain(2))) == (8, 0)
    assert cache.explain(chain(2), EVERYTHING, 0).reason == "expired"
    cache.advance(3)
    assert found(cache, chain(1)) == 0  # two seconds after its last use: a plain hit refreshes and does not lengthen
    left = cache.explain(chain(1), EVERYTHING, 0).left
    assert left is not None
    assert (left.cause, left.moment_s) == ("expired", 3)
    run(cache, chain(5), Keep(ttl_s=2))
    cache.advance(60)  # nobody looked for a long time
    late = cache.explain(chain(5), EVERYTHING, 0).left
    assert (late and late.moment_s) == 5
    run(cache, chain(1), Keep(ttl_s=2))
    run(cache, chain(1, blocks=3))  # stores something that goes on from it, for good
    cache.advance(1000)
    assert found(cache, chain(1, blocks=3)) == 12
    cache.check([])


def test_nothing_expires_while_a_request_holds_it() -> None:
    cache = PrefixCache(16, BLOCK)
    run(cache, chain(1), Keep(ttl_s=2))
    lease = cache.acquire(chain(1), EVERYTHING)
    cache.advance(10)
    assert found(cache, chain(1)) == 8
    cache.release(lease)
    cache.advance(11.9)
    assert found(cache, chain(1)) == 8
    cache.advance(12)
    assert found(cache, chain(1)) == 0


def test_a_default_lifetime_holds_for_all_that_name_none() -> None:
    cache = PrefixCache(16, BLOCK, ttl_s=5)
    run(cache, chain(1))
    run(cache, chain(2), Keep(ttl_s=60))
    cache.advance(6)
    assert (found(cache, chain(1)), found(cache, chain(2))) == (0, 8)


def test_lower_priorities_go_first_and_old_before_young_within_one() -> None:
    cache = PrefixCache(8, BLOCK)
    for first, priority in ((1, 80), (2, 20), (3, 50), (4, 50)):
        run(cache, chain(first), Keep(priority=priority))
    order = list[int]()
    for step in range(3):
        lease = cache.acquire(chain(90 + step, blocks=1), EVERYTHING)
        cache.reserve(lease, 0, 2 * BLOCK)
        order += [first for first in (1, 2, 3, 4) if first not in order and not found(cache, chain(first))]
        cache.publish(lease, chain(90 + step, blocks=1), 0)
    assert order == [2, 3, 4]
    assert found(cache, chain(1)) == 8


@pytest.mark.parametrize(("said", "kept"), [(AS_USUAL, (0, 8)), (Keep(priority=30), (8, 0))])
def test_a_hit_makes_dear_only_what_says_so(said: Keep, kept: tuple[int, int]) -> None:
    cache = PrefixCache(5, BLOCK)
    run(cache, chain(1), Keep(priority=10))
    run(cache, chain(2), Keep(priority=20))
    assert run(cache, chain(1), said) == 8
    cache.reserve(cache.acquire(chain(3), EVERYTHING), 0, 3 * BLOCK)
    assert (found(cache, chain(1)), found(cache, chain(2))) == kept


def burst(cache: PrefixCache, num: int, start: int = 100) -> None:
    """Prompts that come only once."""
    for first in range(start, start + num):
        run(cache, chain(first))


def test_prompts_that_come_once_evict_their_like_and_not_what_is_asked_for_again() -> None:
    cache = PrefixCache(8, BLOCK)
    assert [run(cache, chain(1)), run(cache, chain(2)), run(cache, chain(1))] == [0, 0, 8]
    burst(cache, 20)
    assert (found(cache, chain(1)), found(cache, chain(2))) == (8, 0)
    cache.check([])


@pytest.mark.parametrize(("shared", "kept"), [(1, False), (2, True)])
def test_a_few_tokens_that_all_prompts_begin_with_prove_nothing(shared: int, kept: bool) -> None:
    cache = PrefixCache(4, BLOCK)
    run(cache, chain(1, blocks=1))
    run(cache, Chain(PLAIN, [1] * shared + [2] * 4, tenant=RED))
    for first in range(100, 120):
        run(cache, chain(first, blocks=1))
    assert (found(cache, chain(1, blocks=1)) == 4) == kept


def test_what_was_proven_long_ago_makes_room_for_what_is_asked_for_now() -> None:
    cache = PrefixCache(17, BLOCK)
    for first in tuple(range(1, 9)) * 2:
        run(cache, chain(first))  # all that is cached has proven itself
    burst(cache, 1)
    assert [found(cache, chain(first)) for first in range(1, 9)] == [0] + [8] * 7
    assert run(cache, chain(100)) == 8  # a newcomer that comes again stays
    burst(cache, 20, start=200)
    assert [found(cache, chain(first)) for first in (1, 2, 3)] == [0, 0, 0]
    assert [found(cache, chain(first)) for first in (5, 6, 7, 8, 100)] == [8] * 5
    cache.check([])


def test_a_pinned_prefix_survives_a_flood_and_goes_like_any_other_afterwards() -> None:
    cache = PrefixCache(8, BLOCK, pin_blocks=2)
    run(cache, chain(1))
    pinned = cache.pin(chain(1).hashes, "red")
    assert (pinned.done, pinned.num_blocks, pinned.num_cached, pinned.num_pinned, pinned.budget) == (True, 2, 2, 2, 2)
    for first in range(10, 40):
        run(cache, chain(first))
    assert found(cache, chain(1)) == 8
    assert cache.unpin(chain(1).hashes[-1]) == 2
    assert cache.unpin(chain(1).hashes[-1]) is None
    for first in range(10, 40):
        run(cache, chain(first))
    assert found(cache, chain(1)) == 0
    left = cache.explain(chain(1), EVERYTHING, 0)
    assert (left.reason, left.left and left.left.cause) == ("evicted", "pressure")


def test_a_pin_is_soft_and_comes_back_with_what_it_names() -> None:
    cache = PrefixCache(4, BLOCK, pin_blocks=4)
    run(cache, chain(1))
    cache.pin(chain(1).hashes, "red")
    lease = cache.acquire(chain(2, blocks=4), EVERYTHING)
    assert cache.reserve(lease, 0, 16) == ()  # a request that runs needs it all
    assert found(cache, chain(1)) == 0
    cache.release(lease)
    run(cache, chain(1))
    for first in range(10, 20):
        run(cache, chain(first, blocks=1))
    assert found(cache, chain(1)) == 8


def test_a_pin_beyond_the_budget_changes_nothing() -> None:
    cache = PrefixCache(16, BLOCK, pin_blocks=3)
    assert cache.pin(chain(1).hashes, "red").done
    refused = cache.pin(chain(2).hashes, "red")
    assert (refused.done, refused.num_pinned, refused.budget) == (False, 2, 3)
    assert len(cache.pins()) == 1
    assert cache.pin(chain(1, blocks=3).hashes, "red").done  # the two blocks that both begin with count once
    assert cache.unpin(chain(1).hashes[-1]) == 0
    assert cache.unpin(chain(1, blocks=3).hashes[-1]) == 3


def test_every_tenant_has_the_same_part_of_its_share_to_pin() -> None:
    cache = PrefixCache(16, BLOCK, shares={"red": 8, "blue": 4}, pin_blocks=8)
    assert (cache.pin_budget("red"), cache.pin_budget("blue"), cache.pin_budget("late")) == (4, 2, 0)
    assert cache.pin(chain(1, blocks=2, tenant=BLUE).hashes, "blue").done
    assert not cache.pin(chain(2, blocks=1, tenant=BLUE).hashes, "blue").done
    assert cache.pin(chain(1, blocks=4).hashes, "red").done


def test_another_tenants_blocks_that_are_not_pinned_go_before_pinned_ones() -> None:
    cache = PrefixCache(8, BLOCK, shares={"red": 4, "blue": 4}, pin_blocks=8)
    run(cache, chain(1, blocks=4))
    run(cache, chain(5, blocks=2))
    cache.pin(chain(1, blocks=4).hashes, "red")
    run(cache, chain(2, blocks=2, tenant=BLUE))
    assert found(cache, chain(1, blocks=4)) == 16
    assert cache.owned() == {"red": 5, "blue": 2}
    left = cache.explain(chain(5), EVERYTHING, 4)
    assert (left.reason, left.left and left.left.cause) == ("evicted", "quota")


def test_a_pin_ends_by_itself_and_keeps_from_expiring_meanwhile() -> None:
    cache = PrefixCache(8, BLOCK, pin_blocks=8)
    run(cache, chain(1), Keep(ttl_s=1))
    cache.pin(chain(1).hashes, "red", until_s=10)
    cache.advance(9)
    assert found(cache, chain(1)) == 8
    cache.advance(10)
    assert (cache.pins(), found(cache, chain(1))) == ((), 8)
    cache.advance(11)
    assert found(cache, chain(1)) == 0


def test_forgetting_a_tenant_leaves_others_theirs() -> None:
    cache = PrefixCache(32, BLOCK, pin_blocks=8)
    for tenant in (RED, BLUE):
        run(cache, chain(1, tenant=tenant))
        cache.pin(chain(1, tenant=tenant).hashes, tenant.name)
    red, blue = chain(2), chain(2, tenant=BLUE)
    running = [cache.acquire(tokens, EVERYTHING) for tokens in (red, blue)]
    for lease, tokens in zip(running, (red, blue), strict=True):
        cache.reserve(lease, 0, 9)
        cache.publish(lease, tokens, 4)
    flushed = cache.flush_tenant("red")
    assert (flushed.dropped, flushed.still_held) == (2, 1)
    for lease, tokens in zip(running, (red, blue), strict=True):
        cache.publish(lease, tokens, 8)
        cache.release(lease)
    assert [found(cache, chain(i, tenant=t)) for t in (RED, BLUE) for i in (1, 2)] == [0, 0, 8, 8]
    assert [pin.owner for pin in cache.pins()] == ["blue"]
    assert cache.explain(chain(1), EVERYTHING, 0).reason == "flushed"
    cache.check([])


def test_forgetting_a_prefix_leaves_what_others_begin_with_alike() -> None:
    cache = PrefixCache(32, BLOCK)
    tail, other = Chain(PLAIN, [1] * 8 + [2] * 9), Chain(PLAIN, [1] * 8 + [3] * 9)
    run(cache, tail)
    run(cache, other)
    assert cache.flush_prefix(tail.hashes[2]).dropped == 2
    assert (found(cache, tail), found(cache, other)) == (8, 16)
    assert cache.flush_prefix(other.hashes[3]).dropped == 4  # nothing else begins like it now
    assert cache.state().cached == 0
    assert cache.flush_prefix(other.hashes[3]).dropped == 0


def test_public_blocks_take_no_wishes() -> None:
    head = [7] * 8
    space = Space(PLAIN.root, BLOCK, frozenset(Chain(PLAIN, head).hashes))
    cache = PrefixCache(16, BLOCK)
    tokens = Chain(space, [*head, 1, 2, 3, 4, 5], tenant=RED)
    run(cache, tokens, Keep(ttl_s=1, priority=0))
    cache.advance(5)
    assert found(cache, tokens) == 8
    assert cache.owned() == {PUBLIC: 2, "red": 0}
    assert cache.path(tokens.hashes[1], "red") == ()
    assert cache.path(tokens.hashes[1], PUBLIC) == tuple(tokens.hashes[:2])


@pytest.mark.parametrize("other", [RED, BLUE])
def test_a_path_is_its_owners(other: Tenant) -> None:
    cache = PrefixCache(16, BLOCK)
    run(cache, chain(1))
    own = other is RED
    assert cache.path(chain(1).hashes[1], other.name) == (tuple(chain(1).hashes) if own else ())
