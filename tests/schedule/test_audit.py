"""The live audit: a planted wrong block is found, its prefix is out of the cache, and right ones stay."""

import math

import pytest

from foreword.base.ids import RequestId
from foreword.base.params import EVERYTHING, Reach, Sampling
from foreword.cache.identity import Chain, Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import Nobody
from foreword.schedule.audit import Auditor
from foreword.schedule.plan import Outcome
from foreword.schedule.request import Submission
from foreword.schedule.scheduler import Scheduler
from foreword.testing.fakes import FakeRunner, ManualClock, answer

BLOCK = 4
SPACE = Space(root({"weights": "fake"}, BLOCK), BLOCK)
HEAD = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]


class House:
    """An engine with an auditor, stepped by hand."""

    def __init__(self, share: float = 1.0, blocks: int = 64, tolerance: float = 0.0) -> None:
        self.cache = PrefixCache(blocks, BLOCK)
        self.auditor = Auditor(self.cache, share=share, tolerance=tolerance, max_tokens=8)
        scheduler = Scheduler(self.cache, max_batch_tokens=16, max_running=4, auditor=self.auditor)
        self.runner = FakeRunner(blocks, BLOCK)
        self.engine = Engine(scheduler, self.runner, ManualClock(), Nobody(), self.auditor)
        self.count = 0

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        self.count += 1
        sampling = Sampling(max_tokens=3)
        name = RequestId(str(self.count))
        self.engine.scheduler.add(Submission(id=name, chain=Chain(SPACE, prompt), sampling=sampling, arrival_s=0))
        tokens, cached = list[int](), -1
        while self.engine.scheduler.busy:
            outcome = self.engine.step()
            assert outcome is not None
            for event in outcome.events:
                tokens += [event.sample.token] if event.sample else []
                cached = event.usage.cached_tokens if event.usage else cached
        return tokens, cached

    def audit(self) -> list[Outcome]:
        outcomes = list[Outcome]()
        while self.engine.busy:
            outcome = self.engine.step()
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def spoil(self, block_number: int) -> None:
        block = self.cache._index.find(Chain(SPACE, HEAD).hashes[block_number])
        assert block is not None
        self.runner.memory[block][1] = b"planted!"


def counts(outcomes: list[Outcome]) -> tuple[int, int]:
    return sum(o.stats.blocks_audited for o in outcomes), sum(o.stats.blocks_mismatched for o in outcomes)


def test_right_blocks_pass_and_stay() -> None:
    house = House()
    house.ask([*HEAD, 1])
    assert house.ask([*HEAD, 2])[1] == 12
    assert counts(house.audit()) == (3, 0)
    assert house.ask([*HEAD, 2])[1] == 12
    house.engine.scheduler.check()


def test_a_planted_wrong_block_is_found_and_quarantined() -> None:
    house = House()
    house.ask([*HEAD, 1])
    house.spoil(1)
    assert house.ask([*HEAD, 2])[0] != answer([*HEAD, 2], 3)  # the harm that an audit is for
    compared, wrong = counts(house.audit())
    assert (compared, wrong) == (2, 1)  # no more is looked at: all behind it goes
    tokens, cached = house.ask([*HEAD, 2])
    assert cached == 4  # the block before the wrong one is still good
    assert tokens == answer([*HEAD, 2], 3)
    house.engine.scheduler.check()


def test_a_wrong_block_in_a_later_piece_is_the_one_that_goes() -> None:
    house = House()
    house.ask([*HEAD, 1])
    house.spoil(2)
    house.ask([*HEAD, 2])
    assert counts(house.audit()) == (3, 1)
    assert house.ask([*HEAD, 2]) == (answer([*HEAD, 2], 3), 8)
    house.engine.scheduler.check()


def test_only_hits_are_audited_and_only_their_share() -> None:
    house = House(share=0.25)
    for i in range(8):
        house.ask([i % 7] * 9)
        house.ask([i % 7] * 9)
    assert house.auditor.busy
    assert counts(house.audit())[0] == 2 * 2  # 8 hits, a quarter of them, two blocks each


def test_work_comes_first_and_finds_nothing_held() -> None:
    house = House()
    house.ask([*HEAD, 1])
    house.ask([*HEAD, 2])
    outcome = house.engine.step()
    assert outcome is not None
    assert outcome.stats.blocks_audited == 2  # of three; they stay held for the next piece
    assert house.cache.state().held == 3
    assert house.ask([*HEAD, 3]) == (answer([*HEAD, 3], 3), 12)
    assert house.cache.state().held == 0
    assert counts(house.audit())[0] == 1 + 3  # the rest, and the hit just now
    assert house.cache.state().held == 0


def test_an_audit_never_stands_in_the_way_of_a_request_that_needs_the_room() -> None:
    house = House(blocks=8)
    house.ask([*HEAD, 1])
    house.ask([*HEAD, 2])
    assert house.engine.step() is not None
    assert house.cache.state().held == 3
    prompt = [6, 5] * 14  # with its answer it takes the whole pool
    assert house.ask(prompt)[0] == answer(prompt, 3)


def test_a_full_pool_is_audited_and_loses_one_block() -> None:
    house = House(blocks=8)
    house.ask([7] * 18)  # five blocks
    house.ask([*HEAD, 0])  # three and a part
    house.ask([*HEAD, 0])
    house.ask([6, 6, 6, 6, 6, 1])  # two blocks, and no part is left over
    before = {name for name, _ in house.cache._index}
    assert house.cache.state().free == 0
    assert counts(house.audit()) == (3, 0)
    after = {name for name, _ in house.cache._index}
    assert after <= before
    assert len(before - after) == 1
    assert set(Chain(SPACE, HEAD).hashes) <= after
    assert house.cache.departures["expired"] == 0


def test_nothing_that_an_audit_computes_is_published() -> None:
    house = House()
    house.ask([*HEAD, 1])
    count = len(house.cache._index)
    chain = Chain(SPACE, [*HEAD, 2, 2, 2, 2, 2, 2])
    keep_none = Submission(
        id=RequestId("x"), chain=chain, sampling=Sampling(max_tokens=3), arrival_s=0, reach=Reach(store_tokens=0)
    )
    house.engine.scheduler.add(keep_none)
    assert counts(house.audit()) == (3, 0)
    assert len(house.cache._index) == count
    explanation = house.cache.explain(chain, EVERYTHING, 12)
    assert (explanation.reason, explanation.left) == ("not_stored", None)


def test_what_was_flushed_is_not_audited() -> None:
    house = House()
    house.ask([*HEAD, 1])
    house.ask([*HEAD, 2])
    house.cache.flush()
    assert house.audit() == []
    assert house.cache.state().cached == 0


def test_an_audit_that_fails_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.ask([*HEAD, 1])
    house.ask([*HEAD, 2])
    house.runner.fails = lambda _: True
    assert house.audit() == []
    assert "an audit failed" in caplog.text
    house.runner.fails = lambda _: False
    assert house.ask([*HEAD, 2])[1] == 12
    assert house.cache.state().held == 0


@pytest.mark.parametrize(("error", "wrong"), [(0.0, 0), (0.01, 0), (0.02, 1), (math.nan, 1), (math.inf, 1)])
def test_the_tolerance(error: float, wrong: int) -> None:
    house = House(tolerance=0.01)
    house.ask([1] * 9)
    house.ask([1] * 9)
    while house.auditor.busy:
        plan = house.auditor.plan()
        assert plan is not None
        house.runner.launch(plan).land()
        pairs = house.auditor.commit(plan)
        if pairs:
            verdict = house.auditor.judge(pairs, (error, 0.0))
            assert (verdict.num_compared, verdict.num_mismatched) == (2, wrong)
