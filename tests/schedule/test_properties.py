"""Random commands drive PrefixCache and Scheduler beside a naive cache, on tiny pools, at pipeline depth 1 and 2."""

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from foreword.base.errors import InvariantBroken
from foreword.base.ids import BlockHash, RequestId
from foreword.base.params import AS_USUAL, Keep, Reach, Sampling
from foreword.cache.identity import Chain, Space, Tenant, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.plan import Chunk, Outcome, Plan
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeFlight, FakeRunner, World, answer, cells
from foreword.testing.oracle import NaiveCache

BLOCK = 4
ROOT = root({"weights": "fake"}, BLOCK)
HEADS = ([0, 1, 2, 3, 4, 5, 6, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 2, 2, 2, 2], [5] * 5, [1])
TENANTS = (Tenant(), Tenant("red", b"red"), Tenant("blue", b"blue"))
SPACES = (Space(ROOT, BLOCK), Space(ROOT, BLOCK, frozenset(Chain(Space(ROOT, BLOCK), HEADS[0][:8]).hashes)))
SHARED = b"public"


class Heart(RuleBasedStateMachine):
    """The heart as a server would drive it, one command at a time."""

    depth = 1

    @initialize(
        blocks=st.sampled_from([14, 18, 26, 400]),
        budget=st.integers(BLOCK + 4, 24),
        running=st.integers(1, 4),
        enabled=st.sampled_from([True, True, True, False]),
        shares=st.sampled_from([{}, {"red": 3}, {"red": 2, "blue": 2}]),
        space=st.sampled_from(SPACES),
    )
    def start(  # noqa: PLR0917  (as below)
        self, blocks: int, budget: int, running: int, enabled: bool, shares: dict[str, int], space: Space
    ) -> None:
        off = None if enabled else "cache_disabled"
        self.cache = PrefixCache(blocks, BLOCK, off=off, shares=shares, pin_blocks=blocks)
        self.now = 0.0
        self.space, self.shares = space, shares
        self.scheduler = Scheduler(self.cache, max_batch_tokens=budget, max_running=running)
        self.runner = FakeRunner(blocks, BLOCK)
        self.naive = NaiveCache(BLOCK)
        self.flights: deque[tuple[Plan, FakeFlight]] = deque()
        self.asked: dict[RequestId, tuple[Submission, list[int], World]] = {}
        self.got: dict[RequestId, list[int]] = {}
        self.over: dict[RequestId, str] = {}
        self.known: dict[BlockHash, list[bytes]] = {}
        self.poison: set[RequestId] = set()
        self.reached: dict[RequestId, int] = {}
        self.stale: set[RequestId] = set()
        self.cached_sum = self.computed_sum = 0
        self.cached_said: dict[RequestId, int] = {}
        self.runner.fails = lambda plan: any(c.request in self.poison for c in plan.chunks)

    @rule(
        head=st.sampled_from(HEADS),
        tail=st.sampled_from([[1], [1, 1, 1], [2, 0, 2, 0]]) | st.lists(st.integers(0, 2), min_size=1, max_size=13),
        tenant=st.sampled_from([0, 0, 0, 1, 2]),
        max_tokens=st.integers(1, 9),
        stop=st.sampled_from([frozenset[int](), frozenset({3})]),
        reach=st.sampled_from(
            [Reach()] * 4 + [Reach(read_tokens=6, store_tokens=6), Reach(read=False), Reach(store_tokens=0)]
        ),
        priority=st.sampled_from([0, 0, 0, 1]),
        keep=st.sampled_from([AS_USUAL, AS_USUAL, Keep(ttl_s=2), Keep(priority=0), Keep(priority=100, ttl_s=9)]),
    )
    def submit(  # noqa: PLR0917  (a rule takes one argument for each thing that is drawn)
        self,
        head: list[int],
        tail: list[int],
        tenant: int,
        max_tokens: int,
        stop: frozenset[int],
        reach: Reach,
        priority: int,
        keep: Keep,
    ) -> None:
        if len(self.asked) - len(self.over) >= 7:
            return
        name, prompt = RequestId(str(len(self.asked))), head + tail
        chain = Chain(self.space, prompt, tenant=TENANTS[tenant])
        world = World(TENANTS[tenant].salt, chain.first_private * BLOCK)
        sampling = Sampling(max_tokens=max_tokens, stop_ids=stop)
        ask = Submission(
            id=name, chain=chain, sampling=sampling, arrival_s=0, reach=reach, priority=priority, keep=keep
        )
        self.asked[name], self.got[name], self.runner.worlds[name] = (ask, prompt, world), [], world
        self.scheduler.add(ask)
        self.verify()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.step_once()
            self.verify()

    @rule(pick=st.integers(0, 6))
    def cancel(self, pick: int) -> None:
        live = [n for n in self.asked if n not in self.over]
        if live:
            event = self.scheduler.cancel(live[pick % len(live)], self.now)
            assert event is not None
            assert event.finish == "cancelled"
            self.over[event.request] = "cancelled"
            self.verify()

    @rule(pick=st.integers(0, 6), times=st.integers(1, 3))
    def fail(self, pick: int, times: int) -> None:
        """One request makes every step that it is part of fail; only it may get the error."""
        live = [n for n in self.asked if n not in self.over]
        if live:
            self.poison.add(live[pick % len(live)])
            self.step(times)

    @rule()
    def flush(self) -> None:
        self.scheduler.flush()
        assert self.cache.state().cached == 0
        self.naive.forget()
        self.stale |= self.reached.keys()
        self.known.clear()
        self.verify()

    @rule(tenant=st.sampled_from(TENANTS))
    def flush_tenant(self, tenant: Tenant) -> None:
        before = self.cache.owned()
        self.cache.flush_tenant(tenant.name)
        assert self.cache.owned() == before | ({tenant.name: 0} if tenant.name in before else {})
        self.naive.forget(tenant.salt)
        self.stale |= {name for name in self.reached if self.asked[name][0].chain.tenant == tenant}
        self.known = {name: row for name, row in self.known.items() if self.cache._index.find(name) is not None}
        self.verify()

    @rule(pick=st.integers(0, 20), block=st.integers(0, 2))
    def flush_prefix(self, pick: int, block: int) -> None:
        chains = [ask.chain for ask, _, _ in self.asked.values() if block < len(ask.chain.hashes)]
        if chains:
            chain = chains[pick % len(chains)]
            name = chain.hashes[block]
            if self.cache._index.find(name) is None:
                return
            self.cache.flush_prefix(name)
            assert self.cache._index.find(name) is None
            start = tuple(chain.tokens[: (block + 1) * BLOCK])
            self.naive.forget(chain.tenant.salt if block >= chain.first_private else SHARED, start)
            concerned = [n for n in self.reached if name in self.asked[n][0].chain.hashes]
            self.stale |= set(concerned)
            self.verify()

    @rule(pick=st.integers(0, 20), lasts=st.sampled_from([2.0, 1e9]), pinned=st.booleans())
    def pin(self, pick: int, lasts: float, pinned: bool) -> None:
        asks = [ask for ask, _, _ in self.asked.values() if len(ask.chain.hashes) > ask.chain.first_private]
        if asks:
            chain = asks[pick % len(asks)].chain
            if pinned:
                self.cache.pin(chain.hashes[chain.first_private :], chain.tenant.name, self.now + lasts)
            else:
                self.cache.unpin(chain.hashes[-1])
            self.verify()

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: not self.flights)
    @rule()
    def drain(self) -> None:
        for _ in range(600):
            if not self.scheduler.busy:
                break
            self.step_once()
        assert not self.scheduler.busy, "requests never finish"
        self.verify()
        assert self.cache.state().held == 0

    def step_once(self) -> None:
        while len(self.flights) < self.depth:
            plan = self.scheduler.plan(self.now)
            if plan is None:
                break
            assert plan.num_tokens <= self.scheduler._max_batch_tokens
            for chunk in plan.chunks:
                self.look_up(chunk)
            self.flights.append((plan, self.runner.launch(plan)))
        if not self.flights:
            assert not self.scheduler.busy, "work is left and nothing can be planned"
            return
        plan, flight = self.flights.popleft()
        try:
            result = flight.land()
        except RuntimeError:
            self.flights.clear()
            self.reached.clear()
            self.take(self.scheduler.abort(plan, "planted", self.now))
        else:
            for chunk in plan.chunks:
                self.note(chunk.request, chunk.end)
            self.take(self.scheduler.commit(plan, result, self.now))

    def look_up(self, chunk: Chunk) -> None:
        """A chunk that does not go on where its request was has just been matched: never beyond what is known."""
        assert len(chunk.blocks) == -(-chunk.end // BLOCK)
        ask, _, world = self.asked[chunk.request]
        if self.reached.get(chunk.request) != chunk.start:
            own = self.naive.match(world.name, ask.chain.tokens, ask.reach.read_tokens)
            public = self.naive.match(SHARED, ask.chain.tokens, ask.reach.read_tokens)
            assert chunk.start <= max(own, min(public, world.start))
            self.stale.discard(chunk.request)
        self.reached[chunk.request] = chunk.end

    def note(self, name: RequestId, end: int) -> None:
        """Tell the naive cache what this commit computes (it never learns more than was asked to be stored)."""
        ask, _, world = self.asked[name]
        tokens = list(ask.chain.tokens[:end])
        if name in self.stale:
            return
        self.naive.publish(world.name, tokens)
        self.naive.publish(SHARED, tokens[: world.start])
        row = cells(tokens, world)
        for i in range(len(tokens) // BLOCK):
            self.known[ask.chain.hashes[i]] = row[i * BLOCK : (i + 1) * BLOCK]

    def take(self, outcome: Outcome) -> None:
        self.cached_sum += outcome.stats.prompt_tokens_cached
        self.computed_sum += outcome.stats.prompt_tokens_computed
        parts = outcome.stats.tenants.values()
        assert sum(its.cached for its in parts) == outcome.stats.prompt_tokens_cached
        assert sum(its.computed for its in parts) == outcome.stats.prompt_tokens_computed
        for event in outcome.events:
            name = event.request
            assert name not in self.over, "news of a request that is over"
            if event.sample is not None:
                self.got[name].append(event.sample.token)
            if event.usage is not None:
                use, (ask, prompt, _) = event.usage, self.asked[name]
                assert use.cached_tokens + use.computed_tokens == use.prompt_tokens == len(prompt)
                assert 0 <= use.cached_tokens < len(prompt)
                assert self.cached_said.setdefault(name, use.cached_tokens) == use.cached_tokens
                if ask.reach.read_tokens is not None:
                    assert use.cached_tokens <= ask.reach.read_tokens
            if event.finish is not None:
                self.over[name] = event.finish
                if event.finish == "error":
                    assert name in self.poison, "a neighbour got the error"

    def verify(self) -> None:
        self.scheduler.check()
        state = self.cache.state()
        assert state.free + state.cached + state.held == state.total
        for name, (ask, prompt, world) in self.asked.items():
            truth = answer(prompt, ask.sampling.max_tokens, ask.sampling.stop_ids, world)
            assert self.got[name] == truth[: len(self.got[name])], "another answer than without a cache"
            if self.over.get(name) in ("stop", "length"):
                assert self.got[name] == truth
        for name, block in self.cache._index:
            if name in self.known:
                assert self.runner.memory[block] == self.known[name], "a findable block holds something else"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.flights:
            self.step_once()
        self.drain()
        total = sum(self.cached_said.values())
        finished = {n for n, why in self.over.items() if why in ("stop", "length")}
        if set(self.over) == finished:
            assert self.cached_sum == total
            assert self.cached_sum + self.computed_sum == sum(len(p) for _, p, _ in self.asked.values())


class DeepHeart(Heart):
    """The next plan is made while a step runs."""

    depth = 2


_settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Heart.TestCase.settings = _settings
DeepHeart.TestCase.settings = _settings
TestHeart = Heart.TestCase
TestDeepHeart = DeepHeart.TestCase


def test_released_twice_is_noticed() -> None:
    cache = PrefixCache(4, BLOCK)
    lease = cache.acquire(Chain(SPACES[0], [1] * 9), Reach())
    assert cache.reserve(lease, 0, 8) == ()
    again = lease.blocks
    cache.release(lease)
    lease.blocks = again
    with pytest.raises(InvariantBroken):
        cache.release(lease)
