"""A model whose next step is launched before one has come back answers to the bit as one whose is not.

On a CPU a launch computes and landing only reads, but everything is as on a card: the token that a step draws goes into
the next one before anybody has seen it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from foreword.base.ids import RequestId
from foreword.base.params import Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import Flight, MonotonicClock, Nobody
from foreword.runner.runner import ModelRunner
from foreword.schedule.plan import Plan, Sample, StepResult
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from tests.parity.desk import random_tokens
from tests.runner.models import CONFIGS, build, runner_around

HEAD = random_tokens(40, seed=9)
LENGTHS = (1, 15, 16, 17, 31, 32, 33)
SAMPLINGS = (
    Sampling(max_tokens=20),
    Sampling(max_tokens=17, temperature=0.9, seed=1),
    Sampling(max_tokens=16, temperature=1.2, top_k=20, seed=2, logprobs=3),
    Sampling(max_tokens=19, temperature=0.7, top_p=0.8, seed=3),
    Sampling(max_tokens=1),
    Sampling(max_tokens=18, logprobs=0),
    Sampling(max_tokens=33, temperature=1.0, top_k=50, top_p=0.9, seed=4),
)
PROMPTS = tuple(
    (HEAD if number % 2 else []) + random_tokens(length, seed=length) for number, length in enumerate(LENGTHS)
)


@dataclass
class Faulty:
    """A runner whose step of some number fails, when it is launched or when it lands."""

    runner: ModelRunner
    depth: int
    refused: int | None = None
    failed: int | None = None
    num_pending: int = 0
    """Steps that were launched while another one was under way."""
    _launched: int = 0
    _under_way: int = 0

    def launch(self, plan: Plan) -> "Faulty.Landing":
        self._launched += 1
        if self._launched == self.refused:
            raise RuntimeError("planted refusal")
        self.num_pending += self._under_way > 0
        self._under_way += 1
        return Faulty.Landing(self, self.runner.launch(plan), fails=self._launched == self.failed)

    def rest(self) -> bool:
        return self.runner.rest()

    def compare(self, pairs: object) -> tuple[float, ...]:
        del pairs
        return ()

    @dataclass
    class Landing:
        owner: "Faulty"
        flight: Flight
        fails: bool
        recording_s: float = 0.0

        def land(self) -> StepResult:
            self.owner._under_way = 0 if self.fails else self.owner._under_way - 1
            if self.fails:
                raise RuntimeError("planted failure")
            return self.flight.land()


@dataclass
class Run:
    """All requests at once, and what came of them."""

    runner: Faulty
    blocks: int
    samplings: tuple[Sampling, ...] = SAMPLINGS
    cancels: dict[int, str] = field(default_factory=dict[int, str])
    """Who is cancelled before which step."""
    samples: dict[str, list[Sample]] = field(default_factory=dict[str, list[Sample]])
    ends: dict[str, str] = field(default_factory=dict[str, str])
    preemptions: int = 0
    failures: int = 0

    def go(self) -> "Run":
        runner = self.runner.runner
        cache = PrefixCache(self.blocks, runner.block_size)
        scheduler = Scheduler(cache, max_batch_tokens=48, max_running=6)
        engine = Engine(scheduler, self.runner, MonotonicClock(), Nobody())
        space = Space(root(runner.ingredients, runner.block_size), runner.block_size)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, self.samplings, strict=True)):
            self.samples[str(i)] = []
            chain = Chain(space, prompt)
            scheduler.add(Submission(id=RequestId(str(i)), chain=chain, sampling=sampling, arrival_s=0))
        step = 0
        while scheduler.busy:
            step += 1
            if step in self.cancels and scheduler.cancel(RequestId(self.cancels[step]), 0) is not None:
                self.ends[self.cancels[step]] = "cancelled"
            outcome = engine.step()
            assert outcome is not None
            scheduler.check()
            self.preemptions += outcome.stats.num_preemptions
            self.failures += outcome.stats.num_failures
            for event in outcome.events:
                if event.sample is not None:
                    self.samples[event.request].append(event.sample)
                if event.finish is not None:
                    self.ends[event.request] = event.finish
        assert cache.state().held == 0
        return self


@pytest.fixture(scope="module", params=["llama", "gemma2", "llama, nothing recorded"])
def model(request: pytest.FixtureRequest) -> ModelRunner:
    family, _, how = request.param.partition(", ")
    runner = runner_around(build(CONFIGS[family]()))
    if how:
        runner.record(None)
    assert runner.card.exact
    return runner


@pytest.fixture(scope="module")
def truth(model: ModelRunner) -> dict[str, list[Sample]]:
    """Step by step, in a roomy pool."""
    run = Run(Faulty(model, 1), 64).go()
    assert (run.preemptions, run.failures, set(run.ends.values())) == (0, 0, {"length"})
    assert [len(run.samples[name]) for name in run.samples] == [sampling.max_tokens for sampling in SAMPLINGS]
    return run.samples


FAULTS: tuple[Callable[[ModelRunner], Run], ...] = (
    lambda model: Run(Faulty(model, 2), 64),
    lambda model: Run(Faulty(model, 2), 9),
    lambda model: Run(Faulty(model, 2, refused=9), 64),
    lambda model: Run(Faulty(model, 2, failed=9), 64),
    lambda model: Run(Faulty(model, 2, failed=12), 9),
    lambda model: Run(Faulty(model, 2, refused=12), 9),
    lambda model: Run(Faulty(model, 2), 64, cancels={5: "1", 9: "3"}),
    lambda model: Run(Faulty(model, 2), 9, cancels={5: "1", 9: "3"}),
)
IDS = ("roomy", "tight", "refused", "failed", "tight, failed", "tight, refused", "cancelled", "tight, cancelled")


@pytest.mark.parametrize("make", FAULTS, ids=IDS)
def test_depth_two_answers_as_depth_one(
    make: Callable[[ModelRunner], Run], model: ModelRunner, truth: dict[str, list[Sample]]
) -> None:
    run = make(model).go()
    for name, samples in truth.items():
        if run.ends[name] == "cancelled":
            assert name in run.cancels.values()
            assert run.samples[name] == samples[: len(run.samples[name])]
        else:
            assert run.ends[name] == "length"
            assert run.samples[name] == samples
    assert run.runner.num_pending > 10, "steps have overlapped"
    if not run.cancels:
        assert (run.preemptions > 0) == (run.blocks < 64)
    assert run.failures == (run.runner.failed is not None or run.runner.refused is not None)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_ends_at_a_stop_token_is_not_told_what_came_after_it(
    depth: int, model: ModelRunner, truth: dict[str, list[Sample]]
) -> None:
    stops = {name: samples[min(7, len(samples) - 1)].token for name, samples in truth.items()}
    samplings = tuple(
        Sampling(
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            seed=s.seed,
            logprobs=s.logprobs,
            stop_ids=frozenset({stops[str(i)]}),
        )
        for i, s in enumerate(SAMPLINGS)
    )
    run = Run(Faulty(model, depth), 64, samplings=samplings).go()
    for name, samples in truth.items():
        end = [sample.token for sample in samples].index(stops[name]) + 1
        assert run.samples[name] == samples[:end]
        assert run.ends[name] == "stop"


def test_the_embedded_model(embedded_bf16: ModelRunner) -> None:
    torch.set_num_threads(1)
    one, two = (Run(Faulty(embedded_bf16, depth), 12).go() for depth in (1, 2))
    assert two.samples == one.samples
    assert two.preemptions > 0
    assert two.runner.num_pending > 10 > one.runner.num_pending == 0
