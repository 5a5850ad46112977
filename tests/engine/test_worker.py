"""The engine thread: answers, cancels, failures, capacity, ends."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from foreword.base.errors import CapacityError, RequestError, TenantLimit, Unavailable
from foreword.base.ids import BlockHash, RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import ALONE, Chain, Space, Tenant, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import MonotonicClock, Nobody
from foreword.engine.stream import Stream
from foreword.engine.worker import Worker
from foreword.schedule.admission import limits
from foreword.schedule.plan import StepResult, TokenEvent
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeFlight, FakeRunner, answer

BLOCK, BLOCKS = 4, 64
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
OTHER = Space(root({"weights": "other"}, BLOCK), BLOCK)


class Gate(FakeRunner):
    """Holds every step until it is let through, once closed."""

    def __init__(self, depth: int) -> None:
        super().__init__(BLOCKS, BLOCK, depth)
        self.open = threading.Event()
        self.entered = threading.Event()
        self.open.set()
        self.dies = False
        self.closes_at: int | None = None
        """The number of the step that closes it, from 1."""
        self.held = threading.Event()
        self.rests: list[int] = []
        """How many steps there had been when the runner was let rest; the first two times something was left to do."""
        self.rested = threading.Event()
        self._step = 0

    def rest(self) -> bool:
        self.rests.append(self._step)
        left = len(self.rests) < 3
        if not left:
            self.rested.set()
        return left

    def land(self, flight: FakeFlight) -> StepResult:
        self._step += 1
        if self._step == self.closes_at:
            self.open.clear()
            self.held.set()
        self.entered.set()
        assert self.open.wait(30)
        if self.dies:
            raise SystemExit("planted death")
        return super().land(flight)


class House:
    """An engine with a fake runner."""

    def __init__(self, depth: int, max_live: int = 64) -> None:
        self.runner = Gate(depth)
        self.cache = PrefixCache(BLOCKS, BLOCK)
        scheduler = Scheduler(self.cache, max_batch_tokens=32, max_running=8)
        engine = Engine(scheduler, self.runner, MonotonicClock(), Nobody())
        self.worker = Worker(engine, limits(BLOCKS, BLOCK, 10_000), max_live=max_live)
        self.worker.start()
        self.count = 0

    def ask(self, prompt: list[int], max_tokens: int = 5, space: Space = SPACE, tenant: str = "") -> Stream:
        self.count += 1
        return self.worker.submit(
            Submission(
                id=RequestId(f"r{self.count}"),
                chain=Chain(space, prompt, tenant=Tenant.named(tenant) if tenant else ALONE),
                sampling=Sampling(max_tokens=max_tokens),
                arrival_s=self.worker.now(),
                max_live=2 if tenant else None,
            )
        )


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def depth(request: pytest.FixtureRequest) -> int:
    """Steps under way at once."""
    return request.param


@pytest.fixture
def house(depth: int) -> Iterator[House]:
    built = House(depth)
    yield built
    built.runner.open.set()
    assert built.worker.stop(drain=False, timeout_s=30)


def tokens(events: list[TokenEvent]) -> list[int]:
    return [event.sample.token for event in events if event.sample is not None]


def test_answers_from_many_threads_equal_the_uncached_ones(house: House) -> None:
    prompts = [[0, 1, 2, 3, 4, 5, 6, i % 7, i % 5, i % 3] for i in range(24)]
    streams = [house.ask(prompt) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        events = list(stream)
        assert tokens(events) == answer(prompt, 5)
        assert events[-1].finish == "length"
        assert events[0].usage is not None
        assert events[-1].usage is not None
    house.worker.check()
    assert house.worker.state().pool.held == 0


def test_the_runner_rests_when_nothing_is_wanted(house: House) -> None:
    assert house.runner.rested.wait(30)
    assert house.runner.rests == [0, 0, 0]
    for _ in range(2):
        list(house.ask([1, 2, 3, 4, 5], max_tokens=3))
    assert set(house.runner.rests) <= {0, 3, 6}, "never between two steps of a request"


def test_live_requests_are_told_by_phase_and_owner(house: House) -> None:
    assert house.worker.live() == ((), 0)
    house.runner.closes_at = 3
    first = house.ask([1, 2, 3, 4] * 5, max_tokens=40, tenant="red")
    assert house.runner.held.wait(30)
    second = house.ask([5] * 9, max_tokens=4, tenant="blue")
    live, total = house.worker.live()
    assert (total, [one.phase for one in live]) == (2, ["decode", "waiting"])
    old, new = live
    assert (old.id, old.tenant, old.prompt_tokens, old.cached_tokens, old.computed_tokens) == ("r1", "red", 20, 0, 20)
    assert old.completion_tokens == 2
    assert (new.tenant, new.prompt_tokens, new.computed_tokens, new.completion_tokens) == ("blue", 9, 0, 0)
    assert old.age_s >= new.age_s >= 0
    assert [one.id for one in house.worker.live("blue")[0]] == ["r2"]
    assert house.worker.live(limit=1)[1] == 2
    assert [one.id for one in house.worker.live(limit=1)[0]] == ["r1"]
    assert house.worker.live("green") == ((), 0)
    house.runner.open.set()
    list(second)
    list(first)
    assert house.worker.live() == ((), 0)


async def test_events_arrive_on_an_event_loop(house: House) -> None:
    events = [event async for event in house.ask([1, 2, 3, 4, 5])]
    assert tokens(events) == answer([1, 2, 3, 4, 5], 5)


def test_cancel_stops_within_a_step_and_keeps_the_work(house: House, depth: int) -> None:
    house.runner.open.clear()
    stream = house.ask([1] * 40, max_tokens=100)
    assert house.runner.entered.wait(30)
    house.worker.cancel(stream.request)
    house.runner.open.set()
    assert list(stream)[-1].finish == "cancelled"
    while house.worker.state().running:
        pass
    assert house.worker.state().pool.held == 0
    assert house.worker.state().pool.cached == (8 if depth == 1 else 10)  # the 32 tokens of each step that ran
    events = list(house.ask([1] * 40))
    assert tokens(events) == answer([1] * 40, 5)
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == (32 if depth == 1 else 39)


def test_only_the_request_that_fails_alone_gets_the_error(house: House) -> None:
    house.runner.open.clear()
    first = house.ask([6, 6])
    assert house.runner.entered.wait(30)
    bad, good = house.ask([2, 2, 2, 2, 2]), house.ask([3, 3, 3, 3, 3])
    house.runner.fails = lambda plan: any(c.request == bad.request for c in plan.chunks)
    house.runner.open.set()
    assert tokens(list(first)) == answer([6, 6], 5)
    assert tokens(list(good)) == answer([3] * 5, 5)
    end = list(bad)[-1]
    assert end.finish == "error"
    assert end.error is not None
    assert "planted failure" in end.error
    assert house.worker.alive
    assert tokens(list(house.ask([2, 2, 2]))) == answer([2, 2, 2], 5)


def test_a_dead_engine_thread_ends_every_request_and_takes_none(house: House) -> None:
    house.runner.open.clear()
    streams = [house.ask([1, 2, 3]), house.ask([4, 5])]
    house.runner.dies = True
    house.runner.open.set()
    for stream in streams:
        end = list(stream)[-1]
        assert end.finish == "cancelled"
        assert end.error is not None
        assert "planted death" in end.error
    assert not house.worker.alive
    with pytest.raises(Unavailable):
        house.ask([1])
    with pytest.raises(Unavailable):
        house.worker.flush()


def test_a_full_queue_refuses_and_recovers(depth: int) -> None:
    house = House(depth, max_live=2)
    house.runner.open.clear()
    streams = [house.ask([1]), house.ask([2])]
    with pytest.raises(CapacityError, match="2 requests queued or running"):
        house.ask([3])
    house.runner.open.set()
    for stream in streams:
        assert list(stream)[-1].finish == "length"
    assert list(house.ask([3]))[-1].finish == "length"
    assert house.worker.stop(drain=True, timeout_s=30)


def test_what_can_never_fit_is_refused_with_its_numbers(house: House) -> None:
    with pytest.raises(RequestError, match="256 tokens; at most 255") as prompt:
        house.ask([1] * 256)
    assert prompt.value.field == "prompt"
    with pytest.raises(RequestError, match="at most 56") as answer_:
        house.ask([1] * 200, max_tokens=57)
    assert answer_.value.field == "max_tokens"
    assert list(house.ask([1] * 200, max_tokens=56))[-1].finish == "length"


def test_drain_finishes_what_runs_and_refuses_what_comes(depth: int) -> None:
    house = House(depth)
    house.runner.open.clear()
    stream = house.ask([1, 2, 3], max_tokens=9)
    assert not house.worker.stop(drain=True, timeout_s=0.01)
    with pytest.raises(Unavailable, match="stopping"):
        house.ask([1])
    house.runner.open.set()
    assert tokens(list(stream)) == answer([1, 2, 3], 9)
    assert house.worker.stop(drain=True, timeout_s=30)
    assert not house.worker.alive


def test_flush_forgets_while_requests_run(house: House) -> None:
    assert list(house.ask([5] * 12))[-1].finish == "length"
    assert house.worker.flush().dropped == 4
    end = list(house.ask([5] * 12))[-1]
    assert end.usage is not None
    assert end.usage.cached_tokens == 0


def test_a_reload_waits_for_what_runs_refuses_what_comes_and_begins_empty(house: House) -> None:
    assert list(house.ask([5] * 12))[-1].finish == "length"
    house.runner.open.clear()
    running = house.ask([1, 2, 3])
    assert house.runner.entered.wait(30)
    done: list[BlockHash] = []
    idle: list[bool] = []

    def load() -> BlockHash:
        idle.append(house.worker.state().running == 0)
        return OTHER.root

    thread = threading.Thread(target=lambda: done.append(house.worker.reload(load)))
    thread.start()
    while house.worker.ready:
        pass
    with pytest.raises(Unavailable, match="reloaded") as refused:
        house.ask([1])
    assert refused.value.retry_after_s > 0
    with pytest.raises(Unavailable, match="already"):
        house.worker.reload(load)
    assert house.worker.alive
    house.runner.open.set()
    assert tokens(list(running)) == answer([1, 2, 3], 5)
    thread.join(30)
    assert (done, idle) == ([OTHER.root], [True])
    assert house.worker.ready
    with pytest.raises(Unavailable, match="reloaded"):
        house.ask([5] * 12)  # hashed before, submitted after
    events = list(house.ask([5] * 12, space=OTHER))
    assert tokens(events) == answer([5] * 12, 5)
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == 0


def test_a_reload_that_fails_changes_nothing(house: House) -> None:
    list(house.ask([5] * 12))

    def load() -> BlockHash:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        house.worker.reload(load)
    assert house.worker.ready
    events = list(house.ask([5] * 12))
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == 11


def test_an_engine_that_ends_during_a_reload_tells_whoever_waits(house: House) -> None:
    house.runner.open.clear()
    house.ask([1, 2, 3])
    assert house.runner.entered.wait(30)
    errors: list[Exception] = []

    def reload() -> None:
        try:
            house.worker.reload(lambda: OTHER.root)
        except Unavailable as error:
            errors.append(error)

    thread = threading.Thread(target=reload)
    thread.start()
    house.runner.dies = True
    house.runner.open.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_a_tenant_may_have_so_many_requests_and_others_may_have_theirs(house: House) -> None:
    house.runner.open.clear()
    streams = [house.ask([1], tenant="red"), house.ask([2], tenant="red")]
    with pytest.raises(TenantLimit, match="tenant red has 2 requests queued or running, its limit is 2"):
        house.ask([3], tenant="red")
    streams.append(house.ask([3], tenant="blue"))
    assert house.runner.entered.wait(30)
    live = {name: its.waiting + its.running for name, its in house.worker.state().tenants.items()}
    assert live == {"red": 2, "blue": 1}
    house.runner.open.set()
    for stream in streams:
        assert list(stream)[-1].finish == "length"
    assert list(house.ask([3], tenant="red"))[-1].finish == "length"
    state = house.worker.state().tenants
    assert {name: (its.waiting, its.running, its.held) for name, its in state.items()} == {
        "red": (0, 0, 0),
        "blue": (0, 0, 0),
    }
    assert state["red"].cached >= state["blue"].cached >= 1
    assert sum(its.cached for its in state.values()) == house.worker.state().pool.cached


def test_shares_bound_what_a_tenant_may_ask_for() -> None:
    room = replace(limits(64, BLOCK, 10_000), shares={"red": 16, "blue": 8}, public_blocks=16)
    assert [room.of(name).max_context for name in ("red", "blue", "green")] == [160, 128, 96]
    assert limits(64, BLOCK, 10_000).of("red").max_context == 256
    room.of("red").check(150, 10)
    with pytest.raises(RequestError, match=r"context of 128.*set aside"):
        room.of("blue").check(150, 10)
    with pytest.raises(RequestError, match=r"at most 28.*set aside"):
        room.of("blue").check(100, 29)
    none = replace(room, shares={"red": 48})
    with pytest.raises(RequestError, match="you can have 0 tokens"):
        none.of("green").check(1, 1)
