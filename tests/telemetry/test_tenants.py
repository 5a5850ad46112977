"""Tenants' counters are parts of the whole: nothing is missed, whenever a request is cancelled or preempted."""

import pytest

from foreword.base.ids import RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import Chain, Space, Tenant, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.telemetry import Metrics
from foreword.testing.fakes import FakeRunner, World
from tests.telemetry.test_metrics import read

BLOCK = 4
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
RED, BLUE = Tenant.named("red"), Tenant.named("blue")
ASKED = (("red", RED, [1] * 26), ("red again", RED, [1] * 30), ("blue", BLUE, [1] * 26), ("blue again", BLUE, [1] * 9))


class House:
    """A scheduler whose outcomes are counted."""

    def __init__(self, blocks: int) -> None:
        self.scheduler = Scheduler(PrefixCache(blocks, BLOCK), max_batch_tokens=2 * BLOCK, max_running=3)
        self.runner = FakeRunner(blocks, BLOCK)
        self.metrics = Metrics()
        self.computed = 0
        for name, tenant, prompt in ASKED:
            chain = Chain(SPACE, prompt, tenant=tenant)
            self.runner.worlds[RequestId(name)] = World(tenant.salt)
            self.scheduler.add(
                Submission(id=RequestId(name), chain=chain, sampling=Sampling(max_tokens=6), arrival_s=0)
            )

    def step(self) -> bool:
        plan = self.scheduler.plan(0)
        if plan is not None:
            self.metrics.observe(self.scheduler.commit(plan, self.runner.launch(plan).land(), 0))
        return plan is not None

    def counts(self, what: str) -> tuple[float, float, float]:
        """The whole, and the two tenants' parts."""
        rows = read(self.metrics)
        parts = (
            rows.get(f"foreword_tenant_prompt_tokens_{what}_total{{tenant={name}}}", 0) for name in ("red", "blue")
        )
        return (rows[f"foreword_prompt_tokens_{what}_total"], *parts)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("blocks", [64, 14], ids=["roomy", "tight"])
@pytest.mark.parametrize("cancelled", [name for name, _, _ in ASKED])
def test_a_request_that_is_cancelled_at_any_step(cancelled: str, blocks: int) -> None:
    whole = House(blocks)
    while whole.step():
        pass
    prompts = sum(len(prompt) for _, _, prompt in ASKED)
    assert whole.counts("cached")[0] + whole.counts("computed")[0] == prompts
    early = 0
    for when in range(16):
        house = House(blocks)
        for _ in range(when):
            house.step()
        known = house.scheduler.cancel(RequestId(cancelled), 0)
        while house.step():
            pass
        for what in ("cached", "computed"):
            total, red, blue = house.counts(what)
            assert total == red + blue
        done = house.counts("cached")[0] + house.counts("computed")[0]
        assert done <= prompts
        early += known is not None and done < prompts
        assert house.counts("computed")[2] > 0
    assert early, "no request was cancelled before its prompt was done"


def test_work_of_a_request_that_is_cancelled_in_its_prompt_is_its_tenants() -> None:
    house = House(64)
    house.step()
    assert house.scheduler.cancel(RequestId("red"), 0) is not None
    assert house.counts("computed") == (2 * BLOCK, 2 * BLOCK, 0)
