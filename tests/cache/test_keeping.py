"""What is kept, for how long, in what order it goes, and what a miss says of it: beside a naive model, exactly."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.base.ids import BlockId
from foreword.base.params import AS_USUAL, EVERYTHING, Keep, Reach
from foreword.cache.expiry import NEVER, Expiry
from foreword.cache.identity import ALONE, Chain, Space, root
from foreword.cache.lease import Lease
from foreword.cache.prefix_cache import PrefixCache
from foreword.testing.oracle import NaiveKeeper, Prefix, shared_tokens

BLOCK = 4
SPACE = Space(root({"weights": "w"}, BLOCK), BLOCK)
HEAD = [0] * 16
PIN_BUDGET = 5

REACHES = [EVERYTHING] * 6 + [Reach(read=False), Reach(store_tokens=0), Reach(read_tokens=5, store_tokens=5)]
KEEPS = [AS_USUAL, AS_USUAL, AS_USUAL, Keep(ttl_s=3), Keep(priority=10), Keep(priority=90, ttl_s=8)]
COMMANDS = ["run"] * 12 + ["wait", "pin", "unpin", "flush_prefix"]


def prompt(draw: Random) -> Prefix:
    """One of a few heads, a few bodies, a tail."""
    body = draw.choice([(), (), (0, 0, 1, 1), (1,) * 4, (1,) * 6, (1,) * 8])
    return (*HEAD[: draw.choice([0, 4, 8, 8, 12])], *body, *(draw.randrange(2) for _ in range(draw.randint(1, 5))))


class Beside:
    """A cache and the naive model, driven together."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK, pin_blocks=PIN_BUDGET)
        self.naive = NaiveKeeper(num_blocks, BLOCK)
        self.pins: dict[Prefix, list[Prefix]] = {}
        self.trees: list[set[Prefix]] = []
        self.now = 0.0

    def run(self, tokens: Prefix, reach: Reach, keep: Keep) -> None:
        """One request from its lookup to its release."""
        cache, naive, chain = self.cache, self.naive, Chain(SPACE, tokens)
        limit = reach.readable(len(tokens) - 1)
        full, matched = naive.match(tokens, limit)
        lease = cache.acquire(chain, reach, keep)
        tail = [self.prefix_of(lease.blocks[-1])] if matched % BLOCK else []
        found = [*full, *tail]
        assert (len(lease.blocks), lease.matched_tokens) == (len(found), matched)
        assert all(shared_tokens(prefix, tokens) >= matched for prefix in tail)
        self.check_reason(chain, reach, matched, limit)
        naive.raise_(full, -1 if keep.priority is None else keep.priority, keep.ttl_s or -1)
        if not naive.room(-(-len(tokens) // BLOCK) - len(full), found):
            assert cache.reserve(lease, matched, len(tokens)) is None
            cache.release(lease)
            naive.use(found[::-1])
            return
        assert cache.reserve(lease, matched, len(tokens)) is not None
        cache.count_hit(lease)
        for prefix in [*full, *(tail if 2 * (matched % BLOCK) >= BLOCK else [])]:
            naive.entries[prefix].proven = True
        cache.publish(lease, chain, len(tokens))
        naive.use(tail)
        own = naive.blocks(tokens)[: reach.storable(len(tokens) // BLOCK, BLOCK)]
        for prefix in own[len(full) :]:
            naive.store(prefix, 50 if keep.priority is None else keep.priority, keep.ttl_s or NEVER)
        naive.unstored |= set(naive.blocks(tokens)[max(len(own), len(full)) :])
        cache.check([lease])
        kept = set(lease_names(cache, lease))
        cache.release(lease)
        held = [p for p in dict.fromkeys([*full, *own]) if p in naive.entries]
        naive.use(held[::-1])
        assert {chain.hashes[len(p) // BLOCK - 1] for p in held} == kept

    def prefix_of(self, block: BlockId) -> Prefix:
        return next(p for p in self.naive.entries if Chain(SPACE, p).hashes[-1] == self.cache._index.name_of(block))

    def check_reason(self, chain: Chain, reach: Reach, matched: int, limit: int) -> None:
        """The naive way to say why."""
        tokens, said = tuple(chain.tokens), self.cache.explain(chain, reach, matched)
        assert said.at_token == matched
        if not reach.read:
            assert said.reason == "read_disabled"
        elif matched == limit:
            assert said.reason == ("complete" if matched == len(tokens) - 1 else "prefix_length")
        elif len(tokens) <= BLOCK:
            assert said.reason == "too_short"
        else:
            self.check_miss(tokens, matched, said.reason)
        assert (said.reason in ("flushed", "expired", "evicted")) == (said.left is not None)
        assert (said.reason == "diverged") == bool(said.continues)

    def check_miss(self, tokens: Prefix, matched: int, reason: str) -> None:
        start = matched // BLOCK * BLOCK
        missing = tokens[: start + BLOCK]

        def reaches_further(prefix: Prefix) -> bool:
            fits = len(prefix) == start + BLOCK and prefix[:start] == tokens[:start]
            return fits and shared_tokens(prefix, tokens) > matched

        gone = {why.split()[0] for prefix, why in self.naive.gone.items() if reaches_further(prefix)}
        if missing in self.naive.gone:
            assert reason == self.naive.gone[missing].split()[0]
        elif missing in self.naive.unstored:
            assert reason == "not_stored"
        elif reason in ("flushed", "expired", "evicted"):
            assert reason in gone
        elif reason == "not_stored":
            assert any(map(reaches_further, self.naive.unstored))
        else:
            assert reason == ("diverged" if self.naive.children(tokens[:start]) else "never_seen")

    def other(self, what: str, *more: object) -> None:
        """Everything but a request."""
        if what == "wait":
            self.now += more[0]  # pyright: ignore[reportOperatorIssue]
            self.cache.advance(self.now)
            self.naive.advance(self.now)
        elif what == "flush":
            self.cache.flush()
            if self.naive.entries:
                self.trees = [*self.trees[-1:], set(self.naive.entries)]
            for prefix in tuple(self.naive.entries):
                self.naive.drop(prefix, "flushed at once")
            for prefix, why in tuple(self.naive.gone.items()):
                if why == "flushed at once" and not any(prefix in tree for tree in self.trees):
                    del self.naive.gone[prefix]  # two trees are remembered
            self.pins.clear()
        else:
            tokens = tuple(more[0])  # pyright: ignore[reportArgumentType]
            if len(tokens) >= BLOCK:
                getattr(self, what)(Chain(SPACE, tokens), self.naive.blocks(tokens))
        self.naive.pins = {p for path in self.pins.values() for p in path}
        assert self.cache._pins.num_blocks() == len(self.naive.pins)

    def pin(self, chain: Chain, path: list[Prefix]) -> None:
        fits = len({*path, *(p for one in self.pins.values() for p in one)}) <= PIN_BUDGET
        pinned = self.cache.pin(chain.hashes, ALONE.name)
        assert pinned.done == fits
        assert pinned.num_cached == sum(p in self.naive.entries for p in path)
        if fits:
            self.pins[path[-1]] = path
            self.naive.use([p for p in reversed(path) if p in self.naive.entries])

    def unpin(self, chain: Chain, path: list[Prefix]) -> None:
        known = self.pins.pop(path[-1], None)
        left = {p for one in self.pins.values() for p in one}
        assert self.cache.unpin(chain.hashes[-1]) == (None if known is None else len(set(path) - left))
        if known is not None:
            self.naive.use([p for p in reversed(path) if p in self.naive.entries and p not in left])

    def flush_prefix(self, chain: Chain, path: list[Prefix]) -> None:
        top = path[-1]
        flushed = self.cache.flush_prefix(chain.hashes[-1])
        if top not in self.naive.entries:
            assert flushed.dropped == 0
            return
        while len(top) > BLOCK and self.naive.children(top[:-BLOCK]) == [top]:
            top = top[:-BLOCK]
        gone = [p for p in self.naive.entries if p[: len(top)] == top]
        for last, one in tuple(self.pins.items()):
            if set(one) & set(gone):
                del self.pins[last]
        left = {p for one in self.pins.values() for p in one}
        was = self.naive.pins - left
        self.naive.use([p for p in sorted(was, key=len, reverse=True) if p in self.naive.entries and p not in gone])
        for prefix in gone:
            self.naive.drop(prefix, "flushed")
        assert flushed.dropped == len(gone)


def lease_names(cache: PrefixCache, lease: Lease) -> list[bytes]:
    names = (cache._index.name_of(block) for block in lease.held())
    return [name for name in names if name is not None]


@pytest.mark.parametrize("num_blocks", [7, 10, 40])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_kept_and_lost_and_explained_as_the_naive_model_says(num_blocks: int, seed: int) -> None:
    draw, both = Random(seed), Beside(num_blocks)
    for _ in range(160):
        what = draw.choice(COMMANDS) if draw.random() > 0.01 else "flush"
        both.other("wait", 0.001)
        if what == "run":
            both.run(prompt(draw), draw.choice(REACHES), draw.choice(KEEPS))
        elif what == "wait":
            both.other(what, draw.randint(1, 4))
        else:
            both.other(what, prompt(draw))
        both.cache.check([])
        assert {name for name, _ in both.cache._index} == {Chain(SPACE, p).hashes[-1] for p in both.naive.entries}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=60))
def test_a_moment_is_never_missed_and_the_heap_stays_small(watches: list[tuple[int, int]]) -> None:
    expiry, due = Expiry(), dict[int, int]()
    for now, (block, wait) in enumerate(watches):
        moment = now + wait
        expiry.watch(block, moment)  # pyright: ignore[reportArgumentType]
        due[block] = min(moment, due.get(block, moment))
        popped = set[int]()
        while (over := expiry.pop(now)) is not None:
            popped.add(over)
        assert popped == {b for b, moment in due.items() if moment <= now}
        due = {b: moment for b, moment in due.items() if moment > now}
        assert expiry.next <= min(due.values(), default=NEVER)
