"""Answers that stop anywhere: whatever ends them, whole and true blocks stay behind, all of them, and nothing else.

Each way to end is tried with prompts and answers of all lengths around two block borders. Then the same prompt, every
strict prefix of it, and the prompt with its answer reuse all that was computed.
"""

import pytest

from foreword.base.ids import RequestId
from foreword.base.params import EVERYTHING, Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeRunner, answer, cells

BLOCK = 4
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
PROMPTS = tuple([i * i % 7 for i in range(1, length + 1)] for length in (1, 3, 4, 5, 7, 8, 9, 12))
ENDS = {"length": "length", "end id": "stop", "stop string": "stop", "cancel": "cancelled"}
"""The ways to end, and the finish reasons."""


class House:
    """A scheduler and a fake runner, stepped by hand."""

    def __init__(self) -> None:
        self.cache = PrefixCache(64, BLOCK)
        self.scheduler = Scheduler(self.cache, max_batch_tokens=6, max_running=4)
        self.runner = FakeRunner(64, BLOCK)
        self.count = 0

    def ask(self, prompt: list[int], end: str = "length", after: int = 1) -> int:
        """Let an answer end in this way after so many tokens; how many tokens of the prompt were cached."""
        self.count += 1
        name, truth = RequestId(str(self.count)), answer(prompt, after)
        ids = frozenset({truth[-1]}) if end == "end id" else frozenset[int]()
        sampling = Sampling(max_tokens=after if end == "length" else 50, stop_ids=ids)
        self.scheduler.add(Submission(id=name, chain=Chain(SPACE, prompt), sampling=sampling, arrival_s=0))
        tokens, cached, finish = list[int](), -1, None
        while plan := self.scheduler.plan(0):
            for event in self.scheduler.commit(plan, self.runner.launch(plan).land(), 0).events:
                tokens += [event.sample.token] if event.sample else []
                cached = event.usage.cached_tokens if event.usage else cached
                finish = event.finish or finish
            if len(tokens) == after and end in ("stop string", "cancel"):
                event = self.scheduler.cancel(name, 0, "stop" if end == "stop string" else "cancelled")
                assert event is not None
                finish = event.finish
        assert (tokens, finish, self.cache.state().held) == (truth, ENDS[end], 0)
        self.scheduler.check()
        return cached

    def check_found(self, computed: list[int]) -> None:
        """All whole blocks of these tokens can be found and hold what they should; no other block can be found."""
        chain, row = Chain(SPACE, [*computed, 0]), cells(computed)
        assert self.cache.match(chain, EVERYTHING) == len(computed) // BLOCK == len(self.cache._index)
        for i in range(len(computed) // BLOCK):
            block = self.cache._index.find(chain.hashes[i])
            assert block is not None
            assert self.runner.memory[block] == row[i * BLOCK : (i + 1) * BLOCK]


def lengths(prompt: list[int], end: str) -> list[int]:
    """Lengths of answers that can end so: an end id must not have come before."""
    truth = answer(prompt, 9)
    return [n for n in range(1, 10) if end != "end id" or truth[n - 1] not in truth[: n - 1]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("end", ENDS)
def test_whole_true_blocks_stay_and_all_of_them_are_reused(end: str, prompt: list[int]) -> None:
    for after in lengths(prompt, end):
        computed = [*prompt, *answer(prompt, after - 1)]  # the last token was only drawn
        whole = len(computed) // BLOCK * BLOCK
        house = House()
        assert house.ask(prompt, end, after) == 0
        house.check_found(computed)
        assert house.ask(prompt) == min(whole, len(prompt) - 1), "the same again"
        for cut in range(1, len(prompt)):
            assert house.ask(prompt[:cut]) == min(whole, cut - 1), "a strict prefix of it"
        assert house.ask([*computed, 6, 6]) >= whole, "the next turn"
        house.check_found([*computed, 6, 6][: (len(computed) + 2) // BLOCK * BLOCK])


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("fails_at", range(1, 8))
def test_a_cancel_inside_the_prompt_leaves_what_was_computed(fails_at: int, prompt: list[int]) -> None:
    """Between two chunks, and before the first."""
    house = House()
    chain = Chain(SPACE, prompt * 4)
    house.scheduler.add(Submission(id=RequestId("x"), chain=chain, sampling=Sampling(max_tokens=1), arrival_s=0))
    done = 0
    for _ in range(fails_at - 1):
        plan = house.scheduler.plan(0)
        if plan is None:
            break
        house.scheduler.commit(plan, house.runner.launch(plan).land(), 0)
        done = plan.chunks[0].end
    house.scheduler.cancel(RequestId("x"), 0)
    assert house.scheduler.plan(0) is None
    house.check_found((prompt * 4)[:done])
    assert house.cache.state().held == 0
    assert house.ask(prompt * 4) == min(done // BLOCK * BLOCK, 4 * len(prompt) - 1)
