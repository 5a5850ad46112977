"""Nothing that the scheduler decides for one tenant depends on what another has cached or is computing."""

import random

import pytest

from foreword.base.ids import RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import Chain, Space, Tenant, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeRunner, World

BLOCK, BLOCKS = 4, 80
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
VICTIM, ATTACKER = Tenant.named("victim"), Tenant.named("attacker")
Steps = list[list[tuple[str, int, int]]]


class House:
    """A scheduler for two tenants; remembers who computed how many tokens in which step."""

    def __init__(self) -> None:
        self.runner = FakeRunner(BLOCKS, BLOCK)
        self.scheduler = Scheduler(
            PrefixCache(BLOCKS, BLOCK, shares={"victim": 30, "attacker": 30}), max_batch_tokens=24, max_running=6
        )
        self.steps: Steps = []
        self.cached: dict[str, int] = {}

    def add(self, name: str, tenant: Tenant, prompt: list[int]) -> None:
        self.runner.worlds[RequestId(name)] = World(tenant.name.encode())
        self.scheduler.add(
            Submission(
                id=RequestId(name),
                chain=Chain(SPACE, prompt, tenant=tenant),
                sampling=Sampling(max_tokens=3),
                arrival_s=0.0,
            )
        )

    def step(self) -> None:
        plan = self.scheduler.plan(0.0)
        assert plan is not None
        outcome = self.scheduler.commit(plan, self.runner.launch(plan).land(), 0.0)
        self.steps.append([(str(chunk.request), chunk.start, len(chunk.tokens)) for chunk in plan.chunks])
        for event in outcome.events:
            if event.usage is not None:
                self.cached[str(event.request)] = event.usage.cached_tokens

    def drain(self) -> None:
        while self.scheduler.busy:
            self.step()
        self.scheduler.check()


def run(secret: list[int], asked: list[int], *, who: Tenant, steps_before: int | None) -> House:
    """The victim's request runs for so many steps (None: to its end) when another one comes, with others around."""
    house = House()
    house.add("secret", VICTIM, secret)
    while house.scheduler.busy and steps_before is None:
        house.step()
    for _ in range(steps_before or 0):
        house.step()
    house.add("before", VICTIM, [6, 5, 4, 3, 2, 1] * 4)
    house.add("asked", who, asked)
    house.add("after", ATTACKER, [0, 0, 1, 1, 2, 2] * 4)
    house.drain()
    return house


@pytest.mark.parametrize("steps_before", [0, 1, 2, None])
@pytest.mark.parametrize("shared", [4, 16, 40])
def test_a_strangers_guess_is_scheduled_exactly_as_a_random_prompt(shared: int, steps_before: int | None) -> None:
    draw = random.Random(shared)
    secret, other = ([draw.randrange(7) for _ in range(41)] for _ in range(2))
    guess = [*secret[:shared], *other[shared:]]
    told = run(secret, guess, who=ATTACKER, steps_before=steps_before)
    untold = run(secret, other, who=ATTACKER, steps_before=steps_before)
    assert told.steps == untold.steps
    assert told.cached == untold.cached
    assert told.cached["asked"] == 0
    assert sum(length for step in told.steps for name, start, length in step if name == "asked" and start < 41) == 41
    own = run(secret, guess, who=VICTIM, steps_before=steps_before)
    assert own.cached["asked"] >= shared // BLOCK * BLOCK  # or the above proves nothing
