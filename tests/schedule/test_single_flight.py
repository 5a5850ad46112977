"""Single-flight: waiting for another's work is never slower, by more than a step, than if it had nothing to wait for.

Each case is run twice: once with a leader whose prompt begins like the followers', once with one of equal length that
has nothing in common with theirs. What happens to the leader is the same in both: nothing, a cancel or a failed step at
each possible moment, or a pool so small that requests are preempted. With two plans in flight whoever waits for a step
waits for the one that was planned after it as well: two steps.
"""

from collections.abc import Callable

import pytest

from foreword.base.ids import RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.plan import Outcome, Plan
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeRunner, answer

BLOCK, FOLLOWERS = 4, 2
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
HEAD = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]
FOLLOWER = [*HEAD, 5, 5, 5]
LEADERS = {"shared": [*HEAD, 1, 1, 1], "unrelated": [6 - token for token in [*HEAD, 1, 1, 1]]}
MOMENTS = 6


class Run:
    """A leader and two followers; counts the steps until each has its first token."""

    def __init__(self, leader: list[int] | None, *, depth: int, blocks: int, budget: int) -> None:
        self.scheduler = Scheduler(PrefixCache(blocks, BLOCK), max_batch_tokens=budget, max_running=3)
        self.runner = FakeRunner(blocks, BLOCK)
        self.depth = depth
        self.flights: list[Plan] = []
        self.steps = 0
        self.preemptions = 0
        self.first: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        if leader is not None:
            self.add("leader", leader)
        for i in range(FOLLOWERS):
            self.add(f"follower {i}", [*FOLLOWER, i])

    def add(self, name: str, prompt: list[int]) -> None:
        self.tokens[name] = []
        chain, sampling = Chain(SPACE, prompt), Sampling(max_tokens=4)
        self.scheduler.add(Submission(id=RequestId(name), chain=chain, sampling=sampling, arrival_s=0))

    def step(self) -> bool:
        while len(self.flights) < self.depth and (plan := self.scheduler.plan(0)) is not None:
            self.flights.append(plan)
        if not self.flights:
            return False
        plan = self.flights.pop(0)
        self.steps += 1
        try:
            self.take(self.scheduler.commit(plan, self.runner.launch(plan).land(), 0))
        except RuntimeError:
            self.flights.clear()
            self.take(self.scheduler.abort(plan, "planted", 0))
        self.scheduler.check()
        return True

    def take(self, outcome: Outcome) -> None:
        self.preemptions += outcome.stats.num_preemptions
        for event in outcome.events:
            if event.sample is not None:
                self.first.setdefault(event.request, self.steps)
                self.tokens[event.request].append(event.sample.token)

    def finish(self) -> None:
        while self.step():
            pass
        for i in range(FOLLOWERS):
            assert self.tokens[f"follower {i}"] == answer([*FOLLOWER, i], 4)


Fate = Callable[[Run], None]


def lives(run: Run) -> None:
    pass


def is_cancelled(run: Run) -> None:
    run.scheduler.cancel(RequestId("leader"), 0)


def fails_once(run: Run) -> None:
    """The next step that the leader is part of."""

    def fails(plan: Plan) -> bool:
        hit = any(chunk.request == "leader" for chunk in plan.chunks)
        if hit:
            run.runner.fails = lambda _: False
        return hit

    run.runner.fails = fails


def fails_always(run: Run) -> None:
    run.runner.fails = lambda plan: any(chunk.request == "leader" for chunk in plan.chunks)


@pytest.mark.parametrize("blocks", [64, 11], ids=["roomy", "tight"])
@pytest.mark.parametrize("budget", [8, 16, 64])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fate", [lives, is_cancelled, fails_once, fails_always], ids=lambda fate: fate.__name__)
def test_a_follower_is_at_most_one_step_later(fate: Fate, depth: int, budget: int, blocks: int) -> None:
    saved, worst = 0, dict[str, int]()
    for moment in range(MOMENTS if fate is not lives else 1):
        runs: dict[str, Run] = {}
        for kind, leader in LEADERS.items():
            run = runs[kind] = Run(leader, depth=depth, blocks=blocks, budget=budget)
            for _ in range(moment):
                run.step()
            fate(run)
            run.finish()
        shared, unrelated = runs["shared"], runs["unrelated"]
        for i in range(FOLLOWERS):
            name = f"follower {i}"
            # One step later a fault may hit what it would just have missed, so all moments until now are compared with.
            worst[name] = max(worst.get(name, 0), unrelated.first[name])
            assert shared.first[name] <= worst[name] + depth, f"{name}, {fate.__name__} before step {moment}"
        saved += unrelated.runner.tokens_computed - shared.runner.tokens_computed
    assert saved > 0, "nobody ever waited for anything"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_a_follower_is_at_most_one_step_later_than_alone(depth: int, budget: int) -> None:
    """With no leader at all, followers lead each other."""
    both = Run(None, depth=depth, blocks=64, budget=budget)
    both.finish()
    alone = -(-(len(FOLLOWER) + 1) // (budget // BLOCK * BLOCK))
    assert both.first["follower 0"] <= alone
    assert both.first["follower 1"] <= alone + depth
    assert both.runner.tokens_computed < 2 * len(FOLLOWER)


def test_a_tight_pool_preempts() -> None:
    run = Run(LEADERS["unrelated"], depth=1, blocks=11, budget=64)
    run.finish()
    assert run.preemptions or run.first["follower 1"] > run.first["leader"] + 1
