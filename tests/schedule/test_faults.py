"""One fault at every step of one scenario, at pipeline depth 1 and 2: nothing wrong is findable, nothing leaks.

The scenario: three requests over one head (a hit, a tail and single-flight among them), prompts cut by the budget,
answers that end by length and by a stop id, on a pool that is large, or so small that requests are preempted.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from foreword.base.ids import RequestId
from foreword.base.params import EVERYTHING, Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.plan import Outcome, Plan
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeFlight, FakeRunner, answer, cells

BLOCK = 4
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
HEAD = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
PROMPTS = ([*HEAD, 1, 1, 1, 1, 1, 1], [*HEAD, 2, 2], [*HEAD, 1, 1, 1, 1, 0, 5, 5])
STOP = frozenset({6})
TRUTHS = tuple(answer(prompt, 7, STOP) for prompt in PROMPTS)
CHAINS = tuple(Chain(SPACE, prompt + truth) for prompt, truth in zip(PROMPTS, TRUTHS, strict=True))
CELLS = tuple(cells(chain.tokens) for chain in CHAINS)
STEPS = 20
"""More than the scenario takes."""


@dataclass
class Run:
    """The scenario under way."""

    depth: int
    blocks: int

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, max_batch_tokens=BLOCK + 5, max_running=3)
        self.runner = FakeRunner(self.blocks, BLOCK)
        self.flights: deque[tuple[Plan, FakeFlight]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.preemptions = 0

    def add(self, name: str, prompt: list[int]) -> None:
        self.tokens[name] = []
        sampling = Sampling(max_tokens=7, stop_ids=STOP)
        chain = Chain(SPACE, prompt)
        self.scheduler.add(Submission(id=RequestId(name), chain=chain, sampling=sampling, arrival_s=0))

    def step(self) -> bool:
        """One step of the pipeline; False when there is nothing to do."""
        while len(self.flights) < self.depth and (plan := self.scheduler.plan(0)) is not None:
            self.flights.append((plan, self.runner.launch(plan)))
        if not self.flights:
            assert not self.scheduler.busy, "work is left and nothing can be planned"
            return False
        plan, flight = self.flights.popleft()
        try:
            result = flight.land()
        except RuntimeError:
            self.flights.clear()
            self.take(self.scheduler.abort(plan, "planted", 0))
        else:
            self.take(self.scheduler.commit(plan, result, 0))
        self.verify()
        return True

    def drain(self) -> None:
        for _ in range(500):
            if not self.step():
                return
        raise AssertionError("it never ends")

    def take(self, outcome: Outcome) -> None:
        self.preemptions += outcome.stats.num_preemptions
        for event in outcome.events:
            if event.sample is not None:
                self.tokens[event.request].append(event.sample.token)
            if event.usage is not None:
                self.cached[event.request] = event.usage.cached_tokens
            if event.finish is not None:
                self.ends[event.request] = event.finish

    def verify(self) -> None:
        """The books agree, and every block that can be found holds what its hash says."""
        self.scheduler.check()
        state = self.cache.state()
        assert state.free + state.cached + state.held == state.total
        for chain, row in zip(CHAINS, CELLS, strict=True):
            for i in range(self.cache.match(chain, EVERYTHING)):
                block = self.cache._index.find(chain.hashes[i])
                assert block is not None
                assert self.runner.memory[block] == row[i * BLOCK : (i + 1) * BLOCK]


def cancel(number: int) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        if str(number) not in run.ends:
            event = run.scheduler.cancel(RequestId(str(number)), 0)
            if event is not None:
                run.ends[str(number)] = "cancelled"

    fault.__name__ = f"cancel_{number}"
    return fault


def fail_once(run: Run) -> None:
    """The next step raises half-way through its writing."""

    def fails(_: Plan) -> bool:
        run.runner.fails = lambda _: False
        return True

    run.runner.fails = fails


def fail_one_request(run: Run) -> None:
    """Out of memory, say: every step that request 1 is part of raises."""
    run.runner.fails = lambda plan: any(chunk.request == "1" for chunk in plan.chunks)


def flush(run: Run) -> None:
    run.scheduler.flush()


def quarantine(run: Run) -> None:
    run.cache.quarantine(Chain(SPACE, HEAD).hashes[0])


def late_comer(run: Run) -> None:
    """A request of more turns arrives and squeezes the pool."""
    run.add("late", [6, 6, 6, 6, 6, 6, 6, 6, 6, 6])


FAULTS = (*(cancel(i) for i in range(3)), fail_once, fail_one_request, flush, quarantine, late_comer)


@pytest.mark.parametrize("blocks", [64, 9], ids=["roomy", "tight"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_abort_after_a_fault_at_any_step(fault: Callable[[Run], None], depth: int, blocks: int) -> None:
    for when in range(STEPS):
        run = Run(depth, blocks)
        for i, prompt in enumerate(PROMPTS):
            run.add(str(i), prompt)
        for _ in range(when):
            run.step()
        fault(run)
        run.verify()
        run.drain()
        for i in range(len(PROMPTS)):
            truth = TRUTHS[i]
            if run.ends[str(i)] in ("stop", "length"):
                assert run.tokens[str(i)] == truth, f"fault before step {when}"
            else:
                assert fault is fail_one_request or fault.__name__ == f"cancel_{i}", "a neighbour paid"
                assert run.tokens[str(i)] == truth[: len(run.tokens[str(i)])]
        assert run.cache.state().held == 0
        run.runner.fails = lambda _: False
        for i, prompt in enumerate(PROMPTS):
            run.add(f"again{i}", prompt)
            run.drain()
            assert run.tokens[f"again{i}"] == TRUTHS[i]
        assert run.cached["again2"] >= BLOCK, "the next identical request finds something"
        assert run.cache.state().held == 0


def test_the_scenario_is_over_before_the_last_fault_and_is_squeezed_when_tight() -> None:
    for depth, blocks in ((1, 64), (2, 64), (1, 9), (2, 9)):
        run = Run(depth, blocks)
        for i, prompt in enumerate(PROMPTS):
            run.add(str(i), prompt)
        steps = 0
        while run.step():
            steps += 1
        assert 6 < steps < STEPS, (depth, blocks, steps)
        assert set(run.ends.values()) <= {"stop", "length"}
        assert (run.preemptions > 0) == (blocks < 64)
