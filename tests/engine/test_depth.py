"""Steps under way at once: the same answers and books at depth 1 and 2, whatever ends, fails, or lacks memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import current_thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.base.ids import PENDING_TOKEN, BlockHash, RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import Nobody
from foreword.engine.worker import Worker
from foreword.schedule.admission import limits
from foreword.schedule.plan import Outcome, Plan, StepResult
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeFlight, FakeRunner, ManualClock, answer

BLOCK = 4
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
HEADS = ([0, 1, 2, 3, 4, 5, 6, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 2, 2, 2, 2], [5] * 5, [1])
STOP = frozenset({3})


class Logged(FakeRunner):
    """Writes down what is launched and landed, in order."""

    def __init__(self, num_blocks: int, depth: int) -> None:
        super().__init__(num_blocks, BLOCK, depth)
        self.log: list[str] = []
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> FakeFlight:
        self.log.append(f"launch {plan.step}")
        self.plans.append(plan)
        return super().launch(plan)

    def land(self, flight: FakeFlight) -> StepResult:
        self.log.append(f"land {flight.plan.step}")
        return super().land(flight)


class House:
    """An engine, stepped by hand."""

    def __init__(self, depth: int, blocks: int = 64, budget: int = 64, running: int = 8) -> None:
        self.cache = PrefixCache(blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, max_batch_tokens=budget, max_running=running)
        self.runner = Logged(blocks, depth)
        self.engine = Engine(self.scheduler, self.runner, ManualClock(), Nobody())
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.cached = self.computed = self.preemptions = self.failures = 0

    def ask(self, name: str, prompt: list[int], max_tokens: int = 5, stop: frozenset[int] = frozenset()) -> None:
        self.tokens[name] = []
        sampling = Sampling(max_tokens=max_tokens, stop_ids=stop)
        chain = Chain(SPACE, prompt)
        self.scheduler.add(Submission(id=RequestId(name), chain=chain, sampling=sampling, arrival_s=0))

    def cancel(self, name: str) -> None:
        event = self.scheduler.cancel(RequestId(name), 0)
        if event is not None:
            self.ends[name] = "cancelled"

    def step(self) -> Outcome | None:
        outcome = self.engine.step()
        self.scheduler.check()
        state = self.cache.state()
        assert state.free + state.cached + state.held == state.total
        if outcome is None:
            assert not self.scheduler.busy, "work is left and no step is taken"
            return None
        stats = outcome.stats
        self.cached += stats.prompt_tokens_cached
        self.computed += stats.prompt_tokens_computed
        self.preemptions += stats.num_preemptions
        self.failures += stats.num_failures
        for event in outcome.events:
            assert event.request not in self.ends, "news of a request that is over"
            if event.sample is not None:
                self.tokens[event.request].append(event.sample.token)
            if event.finish is not None:
                self.ends[event.request] = event.finish
        return outcome

    def drain(self) -> None:
        for _ in range(2000):
            if self.step() is None:
                return
        raise AssertionError("it never ends")


def test_the_next_step_is_launched_before_one_is_landed_only_where_the_runner_says_so() -> None:
    logs = dict[int, list[str]]()
    for depth in (1, 2):
        house = House(depth)
        house.ask("a", [1, 2, 3], max_tokens=3)
        house.drain()
        assert house.tokens["a"] == answer([1, 2, 3], 3)
        logs[depth] = house.runner.log
        pending = [PENDING_TOKEN in chunk.tokens for plan in house.runner.plans for chunk in plan.chunks]
        assert pending == ([False] * 3 if depth == 1 else [False, True, True])
    assert logs[1] == ["launch 0", "land 0", "launch 1", "land 1", "launch 2", "land 2"]
    assert logs[2] == ["launch 0", "launch 1", "land 0", "launch 2", "land 1", "land 2"]


def test_a_token_past_the_end_is_computed_and_belongs_to_nobody() -> None:
    prompt = next([1, n] for n in range(7) if 3 in answer([1, n], 6)[:5])
    truth = answer(prompt, 9, STOP)
    steps = dict[int, int]()
    for depth in (1, 2):
        house = House(depth)
        house.ask("a", prompt, 9, STOP)
        house.drain()
        assert (house.tokens["a"], house.ends["a"]) == (truth, "stop")
        assert house.cache.state().held == 0
        steps[depth] = len(house.runner.plans)
    assert steps == {1: len(truth), 2: len(truth) + 1}


def test_a_step_that_cannot_be_launched_loses_nothing_of_the_one_under_way() -> None:
    house = House(2)
    house.ask("a", [1, 2, 3], 6)
    house.step()
    house.ask("bad", [4, 4, 4], 6)
    house.runner.refuses = lambda plan: any(chunk.request == "bad" for chunk in plan.chunks)
    house.step()  # lands what ran when the launch failed
    assert (len(house.tokens["a"]), house.failures) == (2, 0)
    *_, failed, landed = house.runner.log
    assert (failed, landed) == ("launch 2", "land 1")
    house.step()
    assert house.failures == 1
    assert house.runner.log[-1] == landed, "nothing is launched behind what failed, and there is nothing to land"
    house.drain()
    assert house.ends == {"a": "length", "bad": "error"}
    assert house.tokens == {"a": answer([1, 2, 3], 6), "bad": []}


def test_a_step_that_fails_takes_the_one_behind_it_along_and_each_request_runs_alone() -> None:
    house = House(2)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5]), ("c", [6])):
        house.ask(name, prompt, 6)
    house.step()
    house.runner.fails = lambda plan: plan.step == 1
    house.step()
    assert house.failures == 1
    assert house.runner.log[-2:] == ["launch 2", "land 1"], "2 was under way and nobody waits for it"
    for _ in range(3):
        house.step()
    assert [len(plan.chunks) for plan in house.runner.plans[3:6]] == [1, 1, 1]
    house.drain()
    assert house.tokens == {"a": answer([1, 2, 3], 6), "b": answer([4, 5], 6), "c": answer([6], 6)}
    assert house.failures == 1
    assert house.cache.state().held == 0


def test_who_wants_the_same_blocks_waits_for_whoever_computes_them() -> None:
    head = [i % 7 for i in range(21)]
    prompts = [[*head, i % 7, i % 3, i % 5] for i in range(16)]
    computed = list[int]()
    for depth in (1, 2):
        house = House(depth, running=16)
        for i, prompt in enumerate(prompts):
            house.ask(str(i), prompt, 3)
        house.drain()
        assert all(house.tokens[str(i)] == answer(prompt, 3) for i, prompt in enumerate(prompts))
        computed.append(house.computed)
    assert computed[0] == computed[1] <= 24 + 15 * 4, "one computes the head, the others what lies behind five blocks"


@dataclass
class Times:
    """An observer that adds up."""

    steps: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])

    def observe(self, outcome: Outcome) -> None:
        pass

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float) -> None:
        self.steps.append((step_s, bookkeeping_s, recording_s))


class Slow(FakeRunner):
    """Launching takes 1 second, or 100 where it is recorded; a step takes 10 from the end of the one before."""

    def __init__(self, clock: ManualClock, depth: int, records: Callable[[Plan], bool]) -> None:
        super().__init__(64, BLOCK, depth)
        self.clock, self.records, self.ready_s = clock, records, 0.0

    def launch(self, plan: Plan) -> FakeFlight:
        flight = super().launch(plan)
        flight.recording_s = 99.0 * self.records(plan)
        self.clock.time_s += 1 + flight.recording_s
        return flight

    def land(self, flight: FakeFlight) -> StepResult:
        self.ready_s = max(self.ready_s, self.clock.time_s - 1) + 10
        self.clock.time_s = max(self.clock.time_s, self.ready_s)
        return super().land(flight)


@pytest.mark.parametrize("depth", [1, 2])
def test_no_moment_is_in_two_steps_times(depth: int) -> None:
    clock, times = ManualClock(), Times()
    cache = PrefixCache(64, BLOCK)
    scheduler = Scheduler(cache, max_batch_tokens=64, max_running=8)
    engine = Engine(scheduler, Slow(clock, depth, lambda plan: plan.step == 2), clock, times)
    scheduler.add(
        Submission(id=RequestId("a"), chain=Chain(SPACE, [1, 2]), sampling=Sampling(max_tokens=5), arrival_s=0)
    )
    while scheduler.busy:
        engine.step()
    assert len(times.steps) == 5
    assert sum(step_s for step_s, _, _ in times.steps) == clock.time_s
    # At depth 2 the third step is recorded in the turn that brings the second one back.
    assert [spent for _, _, spent in times.steps] == [99.0 * (turn == (2 if depth == 1 else 1)) for turn in range(5)]
    assert all(step_s - spent <= 12 for step_s, _, spent in times.steps)
    assert all(bookkeeping_s == 0 for _, bookkeeping_s, _ in times.steps)


def test_a_reload_begins_when_nothing_is_under_way() -> None:
    house = House(2)
    prompt = next([1, n] for n in range(7) if 3 in answer([1, n], 6)[:5])
    house.ask("a", prompt, 9, STOP)
    worker = Worker(house.engine, limits(64, BLOCK, 256), max_live=8)
    worker._thread = current_thread()
    while not house.ends:
        house.step()
    assert house.scheduler.busy, "a step behind the end is under way"
    busy: list[bool] = []

    def load() -> BlockHash:
        busy.append(house.scheduler.busy)
        return SPACE.root

    assert worker._turn_to(load) == SPACE.root
    assert busy == [False]


_ask = st.tuples(
    st.just("ask"),
    st.sampled_from(HEADS),
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.integers(1, 9),
    st.sampled_from([frozenset[int](), STOP]),
)
_actions = st.lists(
    st.one_of(
        _ask,
        _ask,
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["fails", "refuses"]), st.integers(0, 9)),
        st.tuples(st.just("flush")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(_actions, st.sampled_from([14, 18, 26, 400]), st.integers(BLOCK + 4, 24), st.integers(1, 4))
def test_random_commands_answer_alike_at_both_depths(
    actions: list[tuple[Any, ...]], blocks: int, budget: int, running: int
) -> None:
    for depth in (1, 2):
        _drive(House(depth, blocks, budget, running), actions)


def _drive(house: House, actions: list[tuple[Any, ...]]) -> None:
    bad: dict[str, set[str]] = {"fails": set(), "refuses": set()}
    house.runner.fails = lambda plan: any(chunk.request in bad["fails"] for chunk in plan.chunks)
    house.runner.refuses = lambda plan: any(chunk.request in bad["refuses"] for chunk in plan.chunks)
    prompts = _obey(house, actions, bad)
    house.drain()
    assert set(house.ends) == set(prompts)
    for name, (prompt, max_tokens, stop) in prompts.items():
        truth, tokens, end = answer(prompt, max_tokens, stop), house.tokens[name], house.ends[name]
        assert tokens == (truth if end in ("stop", "length") else truth[: len(tokens)])
        assert end in ("stop", "length", "cancelled") or name in bad["fails"] | bad["refuses"], "a neighbour paid"
    assert house.cache.state().held == 0
    if set(house.ends.values()) <= {"stop", "length"}:
        assert house.cached + house.computed == sum(len(prompt) for prompt, _, _ in prompts.values())


def _obey(
    house: House, actions: list[tuple[Any, ...]], bad: dict[str, set[str]]
) -> dict[str, tuple[list[int], int, frozenset[int]]]:
    """What was asked."""
    prompts = dict[str, tuple[list[int], int, frozenset[int]]]()
    for action in actions:
        match action:
            case ("ask", head, tail, max_tokens, stop):
                name = str(len(prompts))
                prompts[name] = ([*head, *tail], max_tokens, stop)
                house.ask(name, *prompts[name])
            case ("step", times):
                for _ in range(times):
                    house.step()
            case ("flush",):
                house.scheduler.flush()
            case ("cancel", pick) if prompts:
                house.cancel(str(pick % len(prompts)))
            case (how, pick) if prompts:
                bad[how].add(str(pick % len(prompts)))
            case _:
                pass
    return prompts
