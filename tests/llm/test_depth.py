"""The whole library with two steps under way, on the embedded model: nobody who asks can tell."""

import time

from foreword import LLM, Result
from foreword.schedule.plan import Outcome

HEAD = "The lighthouse keeper wrote down every storm, every ship and every bird that passed the tower. " * 3
PROMPTS = [f"{HEAD}{tail}" for tail in ("In the morning", "The keeper's name was", "One, two, three,")]


class Watcher:
    """Adds up what is said of steps."""

    def __init__(self) -> None:
        self.audited = self.mismatched = self.cached = self.computed = self.steps = 0

    def observe(self, outcome: Outcome) -> None:
        self.audited += outcome.stats.blocks_audited
        self.mismatched += outcome.stats.blocks_mismatched
        self.cached += outcome.stats.prompt_tokens_cached
        self.computed += outcome.stats.prompt_tokens_computed

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float) -> None:
        assert 0 <= bookkeeping_s + recording_s <= step_s
        self.steps += 1


def ask(llm: LLM) -> list[list[Result]]:
    """All kinds of answers and ends."""
    return [
        llm.generate(PROMPTS, max_tokens=6, logprobs=2),
        llm.generate(PROMPTS, max_tokens=16, stop=[" the", "."]),
        llm.generate(PROMPTS, max_tokens=6, temperature=0.9, seed=5),
        [llm.chat([{"role": "user", "content": "Say yes."}], max_tokens=12)],
    ]


def test_two_steps_under_way_answer_as_one_does() -> None:
    with LLM(kv_cache="256", audit=1.0, exact=True) as llm:
        parts = llm.assembly
        assert parts.runner.depth == 1
        one = ask(llm)
        llm.flush()
        watcher = Watcher()
        parts.worker._engine.observer = watcher
        parts.runner.depth = 2
        two = ask(llm)
        for ones, twos in zip(one, two, strict=True):
            for first, second in zip(ones, twos, strict=True):
                assert second.token_ids == first.token_ids
                assert (second.text, second.finish_reason) == (first.text, first.finish_reason)
                assert second.logprobs == first.logprobs
                assert second.cached_tokens + second.computed_tokens == second.prompt_tokens
        assert {result.finish_reason for results in two for result in results} == {"stop", "length"}
        assert sum(result.cached_tokens for results in two for result in results) == watcher.cached > 0
        assert sum(result.computed_tokens for results in two for result in results) == watcher.computed
        while parts.worker._engine.busy:
            time.sleep(0.01)
        assert parts.worker.state().pool.held == 0
        assert watcher.audited > 0 == watcher.mismatched
        root = parts.root
        llm.reload()
        assert parts.root == root
        again = llm.generate(PROMPTS, max_tokens=6)
        assert [result.token_ids for result in again] == [result.token_ids for result in one[0]]
