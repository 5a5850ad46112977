"""Promises of the scheduler that random commands would not show by name."""

import pytest

from foreword.base.errors import InvariantBroken, RequestError
from foreword.base.ids import PENDING_TOKEN, RequestId
from foreword.base.params import EVERYTHING, Reach, Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.admission import limits
from foreword.schedule.plan import Outcome, StepResult, TokenEvent
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeRunner, answer

BLOCK = 4
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)


class House:
    """A scheduler and a fake runner, stepped by hand."""

    def __init__(self, blocks: int, budget: int = 64, running: int = 64) -> None:
        self.cache = PrefixCache(blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, max_batch_tokens=budget, max_running=running)
        self.runner = FakeRunner(blocks, BLOCK)
        self.events: list[TokenEvent] = []
        self.preemptions = 0

    def add(
        self, name: str, prompt: list[int], max_tokens: int = 4, reach: Reach = EVERYTHING, priority: int = 0
    ) -> None:
        self.scheduler.add(
            Submission(
                id=RequestId(name),
                chain=Chain(SPACE, prompt),
                sampling=Sampling(max_tokens=max_tokens),
                arrival_s=0,
                reach=reach,
                priority=priority,
            )
        )

    def step(self) -> Outcome | None:
        plan = self.scheduler.plan(0)
        if plan is None:
            return None
        outcome = self.scheduler.commit(plan, self.runner.launch(plan).land(), 0)
        self.events += outcome.events
        self.preemptions += outcome.stats.num_preemptions
        self.scheduler.check()
        return outcome

    def drain(self) -> None:
        while self.step() is not None:
            pass
        assert not self.scheduler.busy

    def tokens(self, name: str) -> list[int]:
        return [e.sample.token for e in self.events if e.request == name and e.sample is not None]


def test_concurrency_sixteen_cold_requests_over_one_head_compute_it_once() -> None:
    house = House(400, budget=64, running=16)
    head = [i % 7 for i in range(200)]
    for i in range(16):
        house.add(str(i), [*head, i % 7, 5 - i % 5, *[i % 3] * 4])
    house.drain()
    assert house.runner.tokens_computed <= 200 + 16 * (6 + 3) + BLOCK  # head once, each its tail and answer
    for i in range(16):
        assert house.tokens(str(i)) == answer([*head, i % 7, 5 - i % 5, *[i % 3] * 4], 4)


def test_a_prefix_length_shares_its_work_as_well() -> None:
    house = House(400, budget=64, running=16)
    head = [i % 7 for i in range(200)]
    for i in range(8):
        house.add(str(i), [*head, i % 7, 1], reach=Reach(read_tokens=200, store_tokens=200))
    house.drain()
    assert house.runner.tokens_computed <= 200 + 8 * (2 + 3) + BLOCK


def test_concurrency_the_rest_finish_when_the_first_of_them_is_cancelled() -> None:
    house = House(400, budget=64, running=16)
    head = [i % 7 for i in range(200)]
    for i in range(8):
        house.add(str(i), [*head, i % 7, 1])
    house.step()
    assert house.scheduler.cancel(RequestId("0"), 0) is not None
    house.drain()
    assert house.runner.tokens_computed <= 200 + 8 * (2 + 3) + BLOCK
    for i in range(1, 8):
        assert house.tokens(str(i)) == answer([*head, i % 7, 1], 4)


def test_hot_prefixes_never_squeeze_decode() -> None:
    house = House(64, budget=64, running=8)
    for i in range(20):  # fill the pool with hot blocks that nobody holds
        house.add(f"hot{i}", [i % 7, *[i // 7] * 11], max_tokens=1)
    house.drain()
    assert house.cache.state().free <= 8
    for i in range(8):
        house.add(f"decoder{i}", [i % 7] * 3, max_tokens=24)
    house.drain()
    assert house.preemptions == 0
    assert all(house.tokens(f"decoder{i}") == answer([i % 7] * 3, 24) for i in range(8))


def test_under_pressure_the_latest_gives_way_and_its_blocks_stay_cached() -> None:
    house = House(10, budget=64, running=4)
    house.add("old", [1] * 9, max_tokens=20)
    house.add("young", [2] * 9, max_tokens=20)
    house.drain()
    assert house.preemptions >= 1
    for name, prompt in (("old", [1] * 9), ("young", [2] * 9)):
        assert house.tokens(name) == answer(prompt, 20)
    ends = {e.request: e.usage for e in house.events if e.finish}
    old, young = ends[RequestId("old")], ends[RequestId("young")]
    assert old is not None
    assert young is not None
    assert old.recomputed_tokens == 0
    assert young.recomputed_tokens > 0
    assert (young.cached_tokens, young.computed_tokens) == (0, 9)


def test_higher_priority_goes_first() -> None:
    house = House(64, budget=8, running=1)
    house.add("low", [1] * 5)
    house.add("high", [2] * 5, priority=1)
    house.drain()
    assert [e.request for e in house.events if e.finish] == ["high", "low"]


def test_a_long_prompt_does_not_stop_those_who_decode() -> None:
    house = House(400, budget=16, running=4)
    house.add("talker", [1] * 3, max_tokens=30)
    house.step()
    house.add("reader", [2] * 200, max_tokens=1)
    for _ in range(10):
        before = len(house.tokens("talker"))
        outcome = house.step()
        assert outcome is not None
        assert outcome.stats.num_chunks == 2
        assert len(house.tokens("talker")) == before + 1
    house.drain()


def test_chunks_that_the_budget_cuts_end_on_block_borders() -> None:
    house = House(400, budget=10, running=4)
    house.add("a", [1] * 33, max_tokens=1)
    ends = list[int]()
    while (plan := house.scheduler.plan(0)) is not None:
        ends.append(plan.chunks[0].end)
        house.scheduler.commit(plan, house.runner.launch(plan).land(), 0)
    assert ends == [8, 16, 24, 33]


def test_the_next_plan_can_be_made_while_a_step_runs() -> None:
    house = House(64)
    house.add("a", [1, 2, 3, 4, 5, 6], max_tokens=3)
    first = house.scheduler.plan(0)
    second = house.scheduler.plan(0)
    assert first is not None
    assert second is not None
    assert second.chunks[0].tokens == (PENDING_TOKEN,)
    assert second.chunks[0].draw is not None
    assert second.chunks[0].draw.number == 1
    for plan in (first, second):
        house.events += house.scheduler.commit(plan, house.runner.launch(plan).land(), 0).events
    house.drain()
    assert house.tokens("a") == answer([1, 2, 3, 4, 5, 6], 3)


def test_commits_out_of_order_are_refused() -> None:
    house = House(64)
    house.add("a", [1, 2, 3], max_tokens=3)
    first, second = house.scheduler.plan(0), house.scheduler.plan(0)
    assert first is not None
    assert second is not None
    with pytest.raises(InvariantBroken, match="not the oldest"):
        house.scheduler.commit(second, StepResult({}), 0)


def test_wrong_reuse_nothing_of_an_aborted_step_is_findable() -> None:
    house = House(64)
    house.add("a", [1] * 20, max_tokens=2)
    house.add("b", [2] * 20, max_tokens=2)
    plan = house.scheduler.plan(0)
    assert plan is not None
    house.scheduler.abort(plan, "planted", 0)
    house.scheduler.check()
    assert house.cache.state().free == 64
    assert house.cache.match(Chain(SPACE, [1] * 20), EVERYTHING) == 0
    house.drain()
    assert house.tokens("a") == answer([1] * 20, 2)
    assert house.tokens("b") == answer([2] * 20, 2)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
def test_repeats_at_block_borders(length: int) -> None:
    house = House(64)
    prompt = [i % 7 for i in range(length)]
    for i in range(3):
        house.add(str(i), prompt, max_tokens=6)
        house.drain()
        assert house.tokens(str(i)) == answer(prompt, 6)
    usage = house.events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == length - 1


def test_the_next_turn_reuses_the_answer() -> None:
    house = House(64)
    prompt = [1, 2, 3, 4, 5, 6]
    house.add("one", prompt, max_tokens=11)
    house.drain()
    house.add("two", [*prompt, *house.tokens("one"), 6, 6], max_tokens=2)
    house.drain()
    usage = house.events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 16  # 6 + 10 tokens had their KV computed; the 11th was only drawn


def test_the_pool_limits_the_context() -> None:
    box = limits(num_blocks=8, block_size=4, max_context=8192)
    assert box.max_context == 32
    with pytest.raises(RequestError, match="32"):
        box.check(32, 1)
    box.check(31, 1)
    assert limits(num_blocks=8000, block_size=4, max_context=100).max_context == 100


@pytest.mark.parametrize("max_tokens", [1, 2, 13, 29])
def test_one_request_alone_can_fill_the_pool(max_tokens: int) -> None:
    house = House(8)
    house.add("a", [1, 2, 3], max_tokens=max_tokens)
    house.drain()
    assert house.tokens("a") == answer([1, 2, 3], max_tokens)
    assert house.preemptions == 0


@pytest.mark.parametrize("prompt", [3, 5, 17, 20, 22])
def test_a_request_as_large_as_the_pool_runs_although_it_could_reuse_a_tail(prompt: int) -> None:
    house = House(6)
    house.add("a", [1, 2, 3, 4, 5], max_tokens=1)
    house.drain()
    tokens = [1, 2, 3, *[6] * 19][:prompt]
    house.add("b", tokens, max_tokens=24 - prompt)
    house.drain()
    assert house.tokens("b") == answer(tokens, 24 - prompt)
