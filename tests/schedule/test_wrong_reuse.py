"""Kinds of fault that users of other engines met in a crowd: many at once, half of them leaving, blocks miscounted.

Everything runs on fakes whose blocks hold a hash of all that came before, so a block that is read before it was
written, or taken over, shows as another answer than `answer` gives.
"""

import random

import pytest

from foreword.base.ids import RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.plan import Plan
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeRunner, answer

BLOCK = 4
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)


class House:
    """A scheduler and a fake runner with so many plans in flight."""

    def __init__(self, blocks: int, *, depth: int = 1, budget: int = 64, running: int = 64) -> None:
        self.cache = PrefixCache(blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, max_batch_tokens=budget, max_running=running)
        self.runner = FakeRunner(blocks, BLOCK)
        self.depth = depth
        self.flights: list[Plan] = []
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.preemptions = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 4) -> None:
        self.asked[name], self.tokens[name] = (prompt, max_tokens), []
        sampling, chain = Sampling(max_tokens=max_tokens), Chain(SPACE, prompt)
        self.scheduler.add(Submission(id=RequestId(name), chain=chain, sampling=sampling, arrival_s=0))

    def cancel(self, name: str) -> None:
        if self.scheduler.cancel(RequestId(name), 0) is not None:
            del self.asked[name]

    def step(self) -> bool:
        while len(self.flights) < self.depth and (plan := self.scheduler.plan(0)) is not None:
            self.flights.append(plan)
        if not self.flights:
            return False
        plan = self.flights.pop(0)
        outcome = self.scheduler.commit(plan, self.runner.launch(plan).land(), 0)
        self.preemptions += outcome.stats.num_preemptions
        for event in outcome.events:
            if event.sample is not None:
                self.tokens[event.request].append(event.sample.token)
            if event.usage is not None:
                self.cached[event.request] = event.usage.cached_tokens
        return True

    def drain(self) -> None:
        """Finish; every answer must be the one that its prompt gets alone, and nothing may be held."""
        while self.step():
            pass
        assert not self.scheduler.busy
        for name, (prompt, max_tokens) in self.asked.items():
            assert self.tokens[name] == answer(prompt, max_tokens), name
        state = self.cache.state()
        assert (state.held, state.free + state.cached) == (0, state.total)
        assert self.cache.idle_fault() is None
        self.scheduler.check()


@pytest.mark.parametrize("blocks", [400, 60], ids=["roomy", "tight"])
@pytest.mark.parametrize("depth", [1, 2])
def test_wrong_reuse_sixty_four_in_one_step(depth: int, blocks: int) -> None:
    house, head = House(blocks, depth=depth), [i * i % 7 for i in range(40 * BLOCK)]
    for round_ in range(10):
        house.cache.flush()
        for i in range(64):
            house.add(f"{round_}/{i}", [*head, i % 7, i // 7 % 7, i // 49, 1, 2], max_tokens=4 if blocks == 400 else 9)
        house.drain()
        hits = [house.cached[f"{round_}/{i}"] for i in range(64)]
        assert min(hits) == 0, "nothing was left of the round before"
        assert sorted(hits)[1] > 0, "the others hit"
    assert (house.preemptions > 0) == (blocks < 400)


@pytest.mark.parametrize("depth", [1, 2])
def test_wrong_reuse_half_are_cancelled_while_they_wait(depth: int) -> None:
    house, draw, head = House(90, depth=depth, running=4), random.Random(depth), [i * i % 7 for i in range(12 * BLOCK)]
    for round_ in range(12):
        for i in range(24):
            house.add(f"{round_}/{i}", [*head, i % 7, i // 7, 1])
        for _ in range(round_):
            house.step()
        for i in draw.sample(range(24), 12):
            house.cancel(f"{round_}/{i}")
        house.drain()
        for i in range(5):
            house.add(f"{round_}/probe {i}", [*head, i, 5, 5])
        house.drain()
        assert all(house.cached[f"{round_}/probe {i}"] >= len(head) for i in range(5))
        if round_ % 3 == 0:
            house.cache.flush()


def churn(num_requests: int, seed: int) -> None:
    """Shared, split and extended prefixes come and go in bursts; at every pause the books add up."""
    house, draw = House(26, budget=24, running=8), random.Random(seed)
    known = [[draw.randrange(7) for _ in range(30)]]
    sent, pauses, hits = 0, 0, 0
    while sent < num_requests:
        for _ in range(draw.randrange(1, 12)):
            base = draw.choice(known)
            cut = draw.randrange(len(base) + 1) if draw.random() < 0.7 else len(base)
            prompt = [*base[:cut], *(draw.randrange(3) for _ in range(draw.randrange(1, 9)))][:60]
            known = [*known[-40:], prompt]
            house.add(str(sent), prompt, draw.choice((1, 2, 4, 20)))
            sent += 1
            for _ in range(draw.randrange(3)):
                house.step()
            if draw.random() < 0.15:
                house.cancel(str(draw.randrange(sent)))
        house.drain()
        pauses += 1
        hits += sum(cached > 0 for cached in house.cached.values())
        house.asked.clear()
        house.tokens.clear()
        house.cached.clear()
    assert hits > num_requests // 2
    assert house.preemptions > 0
    assert house.cache.num_evicted > 0
    assert pauses > num_requests // 12


def test_memory_accounting_over_two_thousand_requests() -> None:
    churn(2_000, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_memory_accounting_over_twenty_thousand_requests() -> None:
    churn(20_000, seed=2)
