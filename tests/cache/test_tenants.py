"""Tenants share nothing but public heads, and a flood by one never evicts what another is sure of."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.base.ids import BlockId
from foreword.base.params import EVERYTHING
from foreword.cache.blocks import PINNED, Shelf
from foreword.cache.identity import PUBLIC, Chain, Space, Tenant, root
from foreword.cache.lease import Lease
from foreword.cache.policy import next_to_give
from foreword.cache.prefix_cache import PrefixCache
from foreword.cache.view import Node, Walk

BLOCK = 4
PLAIN = Space(root({"weights": "w"}, BLOCK), BLOCK)
RED, BLUE = Tenant("red", b"red salt"), Tenant("blue", b"blue salt")
HEAD = list(range(100, 108))
OPEN = Space(PLAIN.root, BLOCK, frozenset(Chain(PLAIN, HEAD).hashes))


def run(cache: PrefixCache, chain: Chain) -> Lease:
    lease = cache.acquire(chain, EVERYTHING)
    assert cache.reserve(lease, lease.matched_tokens, len(chain)) is not None
    cache.publish(lease, chain, len(chain))
    return lease


def hit(cache: PrefixCache, chain: Chain) -> int:
    lease = cache.acquire(chain, EVERYTHING)
    cache.release(lease)
    return lease.matched_tokens


def test_the_stranger_misses_and_the_owner_hits() -> None:
    cache = PrefixCache(16, BLOCK)
    cache.release(run(cache, Chain(PLAIN, [*HEAD, 1], tenant=RED)))
    assert hit(cache, Chain(PLAIN, [*HEAD, 1], tenant=BLUE)) == 0
    assert hit(cache, Chain(PLAIN, [*HEAD, 1])) == 0
    assert hit(cache, Chain(PLAIN, [*HEAD, 1], tenant=RED)) == 8


def test_all_tenants_share_the_public_head_and_nothing_beyond() -> None:
    cache = PrefixCache(16, BLOCK)
    red = Chain(OPEN, [*HEAD, 1, 2, 3, 4, 5], tenant=RED)
    assert red.first_private == 2
    cache.release(run(cache, red))
    assert hit(cache, Chain(OPEN, [*HEAD, 1, 2, 3, 4, 5], tenant=BLUE)) == 8
    assert hit(cache, Chain(OPEN, [*HEAD, 1, 2, 3, 4, 5], tenant=RED)) == 12
    assert [red.owner(i) for i in range(3)] == [PUBLIC, PUBLIC, "red"]


def test_side_channel_the_tree_does_not_tell_who_else_uses_a_public_head() -> None:
    cache = PrefixCache(32, BLOCK)
    longer = Space(PLAIN.root, BLOCK, frozenset(Chain(PLAIN, [*HEAD, *HEAD]).hashes))

    def look(owner: str | None) -> list[Node]:
        walk = Walk(owner=owner)
        while cache.look(walk):
            pass
        return walk.nodes

    def use(tenant: Tenant, tokens: list[int], now: float) -> Lease:
        cache.advance(now)
        chain = Chain(longer, tokens, tenant=tenant)
        lease = cache.acquire(chain, EVERYTHING)
        cache.count_hit(lease)
        assert cache.reserve(lease, lease.matched_tokens, len(chain)) is not None
        cache.publish(lease, chain, len(chain))
        return lease

    cache.release(use(BLUE, [*HEAD, *HEAD, 1], 1.0))
    before, all_before = look("blue"), look(None)
    holding = use(RED, [*HEAD, 2], 2.0)  # red uses a part of it, and goes on using it
    assert look("blue") == before
    assert [(node.hits, node.last_used_s, node.held) for node in before if node.owner == PUBLIC] == [(None, None, None)]
    assert look(None) != all_before
    assert any(node.held and node.hits for node in look(None) if node.owner == PUBLIC)
    cache.release(holding)
    cache.release(use(RED, [*HEAD, *range(20, 29)], 3.0))  # and stores what is its own in the middle of blue's run
    assert look("blue") == before
    assert "red" in {node.owner for node in look(None)}


def test_a_head_that_is_public_only_in_part_is_shared_in_part() -> None:
    other = Chain(OPEN, [*HEAD[:4], 9, 9, 9, 9, 9], tenant=BLUE)
    assert other.first_private == 1
    assert other.hashes[0] == Chain(OPEN, HEAD, tenant=RED).hashes[0]
    assert other.hashes[1] != Chain(OPEN, [*HEAD[:4], 9, 9, 9, 9, 9], tenant=RED).hashes[1]


def test_the_salt_enters_once_right_after_the_head_also_when_it_is_generated_later() -> None:
    grown = Chain(OPEN, HEAD[:6], tenant=RED)
    for token in [*HEAD[6:], 1, 2, 3, 4]:
        grown.append(token)
    whole = Chain(OPEN, [*HEAD, 1, 2, 3, 4], tenant=RED)
    assert grown.hashes == whole.hashes
    assert (grown.first_private, whole.first_private) == (2, 2)


def test_a_flood_never_evicts_what_another_is_sure_of() -> None:
    cache = PrefixCache(16, BLOCK, shares={"red": 8, "blue": 8})
    mine = Chain(PLAIN, [*range(20)], tenant=BLUE)
    cache.release(run(cache, mine))
    for i in range(40):
        cache.release(run(cache, Chain(PLAIN, [i + 200] * 9, tenant=RED)))
    assert hit(cache, mine) == 19
    cache.check([])


def test_what_is_over_its_share_goes_first() -> None:
    cache = PrefixCache(16, BLOCK, shares={"red": 4, "blue": 12})
    for i in range(4):
        cache.release(run(cache, Chain(PLAIN, [i] * 8, tenant=RED)))  # 8 blocks, 4 over its share
    young = Chain(PLAIN, [9] * 9, tenant=RED)
    assert cache.num_available("blue") == 8 + 4
    assert cache.num_available("red") == 8 + 8
    lease = cache.acquire(Chain(PLAIN, [7] * 48, tenant=BLUE), EVERYTHING)
    assert cache.reserve(lease, 0, 49) is None
    assert cache.reserve(lease, 0, 48) == ()
    assert cache.num_available("red") == 4
    cache.check([lease])
    assert hit(cache, young) == 0


def test_public_blocks_outlive_any_flood() -> None:
    cache = PrefixCache(12, BLOCK)
    cache.release(run(cache, Chain(OPEN, [*HEAD, 1], tenant=RED)))
    for i in range(40):
        cache.release(run(cache, Chain(OPEN, [i + 200] * 9, tenant=BLUE)))
    assert hit(cache, Chain(OPEN, [*HEAD, 1], tenant=BLUE)) == 8
    cache.check([])


def test_what_is_public_no_longer_goes_and_does_not_come_back() -> None:
    cache = PrefixCache(16, BLOCK)
    assert cache.share(OPEN.public) == 0
    late = Chain(OPEN, [*HEAD, 1, 2, 3, 4, 5], tenant=BLUE)  # hashed while the head was public
    held = run(cache, Chain(OPEN, [*HEAD, 1, 2, 3, 4, 5], tenant=RED))
    cache.release(run(cache, Chain(PLAIN, [*HEAD, 1], tenant=RED)))
    assert cache.state().cached == 2
    assert cache.share(frozenset()) == 3
    assert hit(cache, late) == 0
    lease = run(cache, late)
    assert lease.published == 0
    cache.release(lease)
    cache.release(held)
    assert hit(cache, late) == 0
    assert hit(cache, Chain(PLAIN, [*HEAD, 1], tenant=RED)) == 8
    assert cache.state().cached == 2
    cache.check([])


def test_a_shorter_head_keeps_its_blocks_when_a_longer_one_goes() -> None:
    cache = PrefixCache(16, BLOCK)
    cache.share(OPEN.public)
    cache.release(run(cache, Chain(OPEN, [*HEAD, 1, 2, 3, 4, 5], tenant=RED)))
    short = Space(PLAIN.root, BLOCK, frozenset(Chain(PLAIN, HEAD[:4]).hashes))
    assert cache.share(short.public) == 2
    assert hit(cache, Chain(short, [*HEAD, 1], tenant=BLUE)) == 4
    cache.release(run(cache, Chain(short, [*HEAD, 1], tenant=BLUE)))
    assert hit(cache, Chain(short, [*HEAD, 1], tenant=BLUE)) == 8
    assert hit(cache, Chain(short, [*HEAD, 1], tenant=RED)) == 4
    assert cache.owned() == {"public": 1, "red": 0, "blue": 1}
    cache.check([])


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4)), min_size=1
    ),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
    st.sampled_from("abc"),
)
def test_blocks_given_together_are_those_given_one_by_one(
    stock: dict[str, tuple[int, int, int]], shares: dict[str, int], asking: str
) -> None:
    def shelves() -> dict[str, Shelf]:
        made = {owner: Shelf(owner) for owner in stock}
        for number, (owner, (usual, pinned, held)) in enumerate(stock.items()):
            for rank, count in ((50, usual), (PINNED, pinned)):
                made[owner].line(rank).update((BlockId(1000 * number + rank + i), None) for i in range(count))
            made[owner].num_published = usual + pinned + held
        return made

    def give(shelf: Shelf, num: int) -> list[BlockId]:
        blocks = shelf.first(num)
        for block in blocks:
            next(line for line in shelf.lines.values() if line).pop(block)
        shelf.num_published -= len(blocks)
        return blocks

    together, single = shelves(), shelves()
    gone: list[BlockId] = []
    while (found := next_to_give(together, shares, asking)) is not None:
        assert found[1] >= 1
        gone += give(*found)
    alone: list[BlockId] = []
    while (found := next_to_give(single, shares, asking)) is not None:
        alone += give(found[0], 1)
    assert gone == alone
