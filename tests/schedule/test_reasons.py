"""A scripted set: every kind of miss at three places, with its reason, its place and its owner right."""

from collections.abc import Callable
from typing import get_args

import pytest

from foreword.base.ids import BlockHash, RequestId
from foreword.base.params import AS_USUAL, EVERYTHING, Keep, Reach, Sampling
from foreword.cache.explain import Explanation, Reason
from foreword.cache.identity import Chain, Content, Space, Tenant, root
from foreword.cache.index import PrefixIndex
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler

BLOCK = 4
SPACE = Space(root({"weights": "w"}, BLOCK), BLOCK)
RELOADED = Space(root({"weights": "v"}, BLOCK), BLOCK)
RED, BLUE = Tenant.named("red"), Tenant.named("blue")
PLACES = (4, 8, 20)


class Script:
    """One cache on which something has happened to what follows a cached head of `at` tokens."""

    def __init__(self, at: int, *, blocks: int = 128, shares: dict[str, int] | None = None) -> None:
        self.cache = PrefixCache(blocks, BLOCK, shares=shares)
        self.scheduler = Scheduler(self.cache, max_batch_tokens=256, max_running=4)
        self.head = [7 + i % 3 for i in range(at)]
        self.space = SPACE
        self.reach = EVERYTHING

    def chain(self, tail: list[int], tenant: Tenant = RED) -> Chain:
        return Chain(self.space, [*self.head, *tail], tenant=tenant)

    def run(self, tail: list[int], reach: Reach = EVERYTHING, keep: Keep = AS_USUAL) -> None:
        chain = self.chain(tail)
        lease = self.cache.acquire(chain, reach, keep)
        assert self.cache.reserve(lease, lease.matched_tokens, len(chain)) is not None
        self.cache.publish(lease, chain, len(chain))
        self.cache.release(lease)

    def ask(self, tail: list[int], tenant: Tenant = RED) -> Explanation:
        return self.scheduler.lookup(self.chain(tail, tenant), self.reach, self.cache._pool.now)


ONE, OTHER = [1] * 9, [2] * 9


def diverged(at: int) -> Script:
    script = Script(at)
    script.run(OTHER)
    return script


def diverged_inside_a_block(at: int) -> Script:
    script = Script(at)
    script.run([*ONE[:2], 3, 3, 3])
    return script


def never_seen(at: int) -> Script:
    script = Script(at)
    script.run([])
    return script


def complete(at: int) -> Script:
    script = Script(at)
    script.run([*ONE, 1, 1, 1])
    return script


def prefix_length(at: int) -> Script:
    script = complete(at)
    script.reach = Reach(read_tokens=at)
    return script


def read_disabled(at: int) -> Script:
    script = complete(at)
    script.reach = Reach(read=False)
    return script


def flushed(at: int) -> Script:
    script = Script(at)
    script.run(OTHER)
    script.run(ONE)
    script.cache.flush_prefix(script.chain(ONE).hashes[at // BLOCK])
    return script


def flushed_at_once(at: int) -> Script:
    script = Script(at)
    script.run(ONE)
    script.cache.flush()
    script.run([])
    return script


def expired(at: int) -> Script:
    script = Script(at)
    script.run([])
    script.run(ONE, keep=Keep(ttl_s=2))
    script.cache.advance(5)
    return script


def evicted(at: int) -> Script:
    script = Script(at, blocks=at // BLOCK + 3)
    script.run(ONE)
    script.cache.reserve(script.cache.acquire(Chain(SPACE, [9] * 12, tenant=RED), EVERYTHING), 0, 3 * BLOCK)
    return script


def evicted_by_quota(at: int) -> Script:
    script = Script(at, blocks=at // BLOCK + 3, shares={"red": at // BLOCK, "blue": 3})
    script.run(ONE)
    script.cache.reserve(script.cache.acquire(script.chain([], BLUE), EVERYTHING), 0, 3 * BLOCK)
    return script


def not_stored(at: int) -> Script:
    script = Script(at)
    script.run([])
    script.run(ONE, Reach(store_tokens=0))
    return script


def other_namespace(at: int) -> Script:
    script = Script(at)
    script.run(ONE)
    script.cache.flush()
    script.space = RELOADED
    script.run([])
    return script


def pending(at: int) -> Script:
    script = Script(at)
    script.run([])
    chain = script.chain(ONE)
    script.scheduler.add(Submission(id=RequestId("busy"), chain=chain, sampling=Sampling(max_tokens=1), arrival_s=0.0))
    assert script.scheduler.plan(0.0) is not None
    return script


KINDS: tuple[tuple[Callable[[int], Script], Reason, int], ...] = (
    (diverged, "diverged", 0),
    (diverged_inside_a_block, "diverged", 2),
    (never_seen, "never_seen", 0),
    (complete, "complete", 8),
    (prefix_length, "prefix_length", 0),
    (flushed, "flushed", 0),
    (flushed_at_once, "flushed", 0),
    (expired, "expired", 0),
    (evicted, "evicted", 0),
    (evicted_by_quota, "evicted", 0),
    (not_stored, "not_stored", 0),
    (other_namespace, "other_namespace", 0),
    (pending, "pending", 0),
)


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize(("kind", "reason", "further"), KINDS, ids=[kind.__name__ for kind, _, _ in KINDS])
def test_a_miss_says_why_and_where_to_its_owner_and_nothing_to_a_stranger(
    kind: Callable[[int], Script], reason: Reason, further: int, at: int
) -> None:
    script = kind(at)
    before = (
        script.cache.state(),
        list(script.cache._pool.hits),
        [shelf.order() for shelf in script.cache._pool.shelves.values()],
    )
    said, stranger = script.ask(ONE), script.ask(ONE, BLUE)
    assert (said.reason, said.at_token) == (reason, at + further)
    assert (said.left is not None) == (reason in ("flushed", "expired", "evicted"))
    assert stranger == Explanation("never_seen", 0)
    assert before == (
        script.cache.state(),
        list(script.cache._pool.hits),
        [shelf.order() for shelf in script.cache._pool.shelves.values()],
    )


@pytest.mark.parametrize("at", PLACES)
def test_reasons_that_have_no_place(at: int) -> None:
    assert read_disabled(at).ask(ONE) == Explanation("read_disabled", 0)
    for off in ("cache_disabled", "model_not_cacheable"):
        script = Script(at)
        script.cache.off = off
        assert script.ask(ONE) == Explanation(off, 0)
    script = Script(0)
    script.head = [5]
    script.run([5, 6, 6, 6])
    assert script.ask([1, 1]) == Explanation("too_short", 1)


@pytest.mark.parametrize("at", PLACES)
def test_how_what_is_missing_left_and_when(at: int) -> None:
    causes = [kind(at).ask(ONE).left for kind in (flushed, expired, evicted, evicted_by_quota)]
    assert [left and left.cause for left in causes] == ["flushed", "expired", "pressure", "quota"]
    assert causes[1] is not None
    assert causes[1].moment_s == 2  # when its time was up, not when somebody looked


@pytest.mark.parametrize("at", PLACES)
def test_the_nearest_cached_continuation_is_named(at: int) -> None:
    assert diverged(at).ask(ONE).continues == tuple(OTHER[:8])
    assert diverged_inside_a_block(at).ask(ONE).continues == (3, 3)


def test_every_reason_is_in_the_set() -> None:
    told = {reason for _, reason, _ in KINDS}
    assert told | {"read_disabled", "cache_disabled", "model_not_cacheable", "too_short"} == set(get_args(Reason))


def test_a_tail_alone_says_how_it_left() -> None:
    script = Script(8, blocks=3)
    script.run([1, 1, 1, 1])
    assert script.ask([1, 1, 1]).reason == "complete"  # from inside the third block
    lease = script.cache.acquire(script.chain([], BLUE), EVERYTHING)
    script.cache.reserve(lease, 0, BLOCK)
    said = script.ask([1, 1, 1])
    assert (said.reason, said.at_token) == ("evicted", 8)


def test_a_reason_takes_as_long_however_long_the_match_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a reload, when what is known of other weights has other hashes: nothing is followed block by block."""
    asked: list[BlockHash] = []

    def counted(index: PrefixIndex, parent: BlockHash, content: Content) -> tuple[BlockHash, int] | None:
        asked.append(parent)
        return nearest(index, parent, content)

    nearest = PrefixIndex.nearest
    for kind in (other_namespace, diverged):
        counts = list[int]()
        for at in (8, 400):
            script = kind(at)
            with monkeypatch.context() as patch:
                patch.setattr(PrefixIndex, "nearest", counted)
                assert script.ask(ONE).at_token == at
            counts.append(len(asked))
            asked.clear()
        assert counts[0] == counts[1] > 0


def test_other_weights_are_remembered_through_one_more_flush_and_not_for_ever() -> None:
    script = other_namespace(8)
    script.cache.flush()
    script.run([])
    assert script.ask(ONE).reason == "other_namespace"
    assert script.ask(OTHER).reason != "other_namespace"
    script.cache.flush()
    script.run([])
    assert script.ask(ONE).reason != "other_namespace"
