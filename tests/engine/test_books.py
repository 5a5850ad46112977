"""Broken books: reuse stops for whom they are about, for nobody else, and the log has all one needs to find out why."""

import json
import logging
from typing import Any

import pytest

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import EVERYTHING, Sampling
from foreword.cache.identity import ALONE, Chain, Space, Tenant, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import Nobody
from foreword.engine.worker import Worker
from foreword.schedule.admission import limits
from foreword.schedule.plan import Plan
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeFlight, FakeRunner, ManualClock, World, answer

BLOCK, BLOCKS = 4, 64
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
HEAD = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
PUBLIC = Space(SPACE.root, BLOCK, frozenset(Chain(SPACE, HEAD[:4]).hashes))
RED, BLUE = Tenant.named("red"), Tenant.named("blue")


class House:
    """An engine, stepped by hand."""

    def __init__(self, space: Space = SPACE) -> None:
        self.cache = PrefixCache(BLOCKS, BLOCK)
        self.runner = FakeRunner(BLOCKS, BLOCK)
        self.engine = Engine(
            Scheduler(self.cache, max_batch_tokens=64, max_running=8), self.runner, ManualClock(), Nobody()
        )
        self.space = space
        self.count = 0
        self.reason = ""

    def submission(self, prompt: list[int], tenant: Tenant) -> Submission:
        self.count += 1
        name, chain = RequestId(f"r{self.count}"), Chain(self.space, prompt, tenant=tenant)
        self.runner.worlds[name] = World(tenant.salt, chain.first_private * BLOCK)
        return Submission(id=name, chain=chain, sampling=Sampling(max_tokens=3), arrival_s=0)

    def ask(self, prompt: list[int], tenant: Tenant) -> int:
        """Tokens that were cached; the answer must be right whatever happened."""
        asked = self.submission(prompt, tenant)
        world = self.runner.worlds[asked.id]
        self.engine.scheduler.add(asked)
        tokens, cached = list[int](), -1
        while self.engine.scheduler.busy:
            outcome = self.engine.step()
            assert outcome is not None
            for event in outcome.events:
                tokens += [event.sample.token] if event.sample else []
                if event.usage:
                    cached, self.reason = event.usage.cached_tokens, event.usage.reason
        assert tokens == answer(prompt, 3, world=world)
        return cached

    def leak(self, prompt: list[int], tenant: Tenant) -> None:
        """Hold as a request would, private blocks as well, and lose the lease."""
        chain = Chain(self.space, prompt, tenant=tenant)
        lease = self.cache.acquire(chain, EVERYTHING)
        assert self.cache.reserve(lease, lease.matched_tokens, len(prompt)) is not None


def dumps(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    begin = "the books at a fault: "
    return [json.loads(r.getMessage().removeprefix(begin)) for r in caplog.records if r.getMessage().startswith(begin)]


def test_a_leak_stops_the_tenant_that_it_is_about_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    for tenant in (RED, BLUE):
        assert house.ask([*HEAD, 1], tenant) == 0
        assert house.ask([*HEAD, 2], tenant) == 12
    house.leak([*HEAD, 1, 1, 1, 1, 1], RED)
    assert house.ask([*HEAD, 3], BLUE) == 12
    assert "prompts of tenant red are computed whole" in caplog.text
    for _ in range(2):
        assert (house.ask([*HEAD, 3], RED), house.reason) == (0, "cache_disabled")
        assert house.ask([*HEAD, 3], BLUE) >= 12
    assert house.cache.owned()["red"] == 0 < house.cache.owned()["blue"]
    assert (house.cache.reuses("red"), house.cache.reuses("blue"), house.cache.enabled) == (False, True, True)
    assert len(dumps(caplog)) == 1, "one fault is told once"
    house.engine.scheduler.check()
    state = house.cache.state()
    assert (state.held, state.free + state.cached + state.held) == (5, BLOCKS)  # nobody gets the lost blocks


def test_requests_of_a_stopped_tenant_do_not_wait_for_each_other() -> None:
    house = House()
    house.leak(HEAD, RED)
    house.ask([1], BLUE)
    for _ in range(4):
        house.engine.scheduler.add(house.submission(HEAD, RED))
    outcome = house.engine.step()
    assert outcome is not None
    assert outcome.stats.num_tokens == 4 * len(HEAD)


@pytest.mark.parametrize("how", ["public", "alone"])
def test_a_leak_of_what_all_share_stops_everybody(how: str, caplog: pytest.LogCaptureFixture) -> None:
    tenant = RED if how == "public" else ALONE
    house = House(PUBLIC if how == "public" else SPACE)
    house.ask([*HEAD, 1], tenant)
    assert house.ask([*HEAD, 2], tenant) == 12
    house.leak([*HEAD, 1], tenant)
    house.ask([*HEAD, 2], tenant)
    assert "prompts of everybody are computed whole" in caplog.text
    for who in (tenant, BLUE):
        assert [house.ask([*HEAD, 2], who) for _ in range(2)] == [0, 0]
    assert not house.cache.enabled
    assert len(dumps(caplog)) == 1


def test_a_contradiction_that_names_nobody_stops_everybody(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.ask([*HEAD, 1], RED)
    chain = Chain(SPACE, HEAD, tenant=RED)
    house.cache._index.drop(house.cache._index.blocks(chain.hashes[-1:]))
    house.ask([6], BLUE)
    assert "prompts of everybody" in caplog.text
    assert [house.ask([*HEAD, 2], who) for who in (RED, RED, BLUE, BLUE)] == [0] * 4
    assert len(dumps(caplog)) == 1


def test_the_dump_says_who_held_what_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.ask([*HEAD, 1], RED)
    house.cache.flush()
    house.ask([*HEAD, 1], RED)
    house.leak([*HEAD, 1], RED)
    house.ask([*HEAD, 2], BLUE)
    (dump,) = dumps(caplog)
    assert dump["what"].startswith("nothing runs and somebody holds 4 blocks")
    assert dump["generation"] == 1
    assert dump["pool"]["held"] == 4
    assert dump["requests"] == []
    assert [(d["holders"], d["leases"], d["owner"]) for d in dump["doubts"]] == [(1, 0, "red")] * 4
    published = {name.hex()[:12] for name in Chain(SPACE, HEAD, tenant=RED).hashes}
    assert {d["hash"] for d in dump["doubts"]} == published | {None}
    assert not {"tokens", "prompt_ids", "ids"} & set(dump)


def test_an_engine_that_dies_dumps_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeRunner):
        def launch(self, plan: Plan) -> FakeFlight:
            if self.tokens_computed > len(HEAD):
                raise SystemExit("planted")  # no step is undone for this
            return super().launch(plan)

    house = House()
    house.engine.runner = house.runner = Broken(BLOCKS, BLOCK)
    worker = Worker(house.engine, limits(BLOCKS, BLOCK, 256), max_live=8)
    with caplog.at_level(logging.CRITICAL):
        worker.start()
        stream = worker.submit(house.submission([*HEAD, 1], RED))
        assert [event.finish for event in stream][-1] == "cancelled"
        assert worker.stop(drain=False, timeout_s=10)
    (dump,) = dumps(caplog)
    assert dump["what"] == "SystemExit: planted"
    (account,) = dump["requests"]
    assert (account["id"], account["tenant"], account["prompt"], account["generated"]) == ("r1", "red", 13, 1)
    assert (account["computed"], account["planned"], account["in_flight"]) == (13, 14, 1)
    assert account["held"]["blocks"] == [BlockId(i) for i in range(4)]
    assert (account["held"]["published"], dump["doubts"]) == (3, [])
