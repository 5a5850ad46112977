"""`--audit` and `--exact` on the embedded model: a planted wrong block is found, its prefix leaves the cache."""

import time

import pytest

from foreword import LLM, ConfigError
from foreword.runner.runner import ModelRunner
from foreword.schedule.plan import Outcome, StepStats

PROMPT = "The lighthouse keeper wrote down every storm, every ship and every bird that passed the tower. " * 4


class Watcher:
    """Adds up what audits found."""

    def __init__(self) -> None:
        self.audited = self.mismatched = 0

    def observe(self, outcome: Outcome) -> None:
        stats: StepStats = outcome.stats
        self.audited += stats.blocks_audited
        self.mismatched += stats.blocks_mismatched

    def observe_step(self, step_s: float, bookkeeping_s: float, recording_s: float) -> None:
        pass

    def wait(self, blocks: int) -> None:
        for _ in range(600):
            if self.audited >= blocks:
                return
            time.sleep(0.05)
        raise AssertionError(f"only {self.audited} blocks were audited")


def test_a_planted_wrong_block_is_found_and_right_ones_stay() -> None:
    with LLM(kv_cache="256", audit=1.0, exact=True) as llm:
        watcher = Watcher()
        llm.assembly.worker._engine.observer = watcher
        cold = llm.generate(PROMPT, max_tokens=4, logprobs=0)[0]
        warm = llm.generate(PROMPT, max_tokens=4, logprobs=0)[0]
        assert warm.cached_tokens == warm.prompt_tokens // 16 * 16
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
        watcher.wait(warm.prompt_tokens // 16)
        assert watcher.mismatched == 0

        runner = llm.assembly.runner
        assert isinstance(runner, ModelRunner)
        cache = llm.assembly.worker._engine.scheduler.cache
        block = next(block for _, block in cache._index)  # the first that was published: the prompt's first
        runner.memory.buffer[block, 7] += 1.0
        llm.generate(PROMPT, max_tokens=1)
        watcher.wait(2 * (warm.prompt_tokens // 16))
        assert watcher.mismatched == 1
        again = llm.generate(PROMPT, max_tokens=4, logprobs=0)[0]
        assert again.cached_tokens == 0
        assert (again.token_ids, again.logprobs) == (cold.token_ids, cold.logprobs)


@pytest.mark.parametrize("audit", [-0.1, 1.1])
def test_a_share_is_between_0_and_1(audit: float) -> None:
    with pytest.raises(ConfigError, match="audit"):
        LLM(audit=audit)
