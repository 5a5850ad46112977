"""What the settings become, and what a running assembly gives back."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from foreword import LLM, ConfigError
from foreword.assemble import _limits, _served
from foreword.base.config import CacheConfig, Config, ScheduleConfig
from foreword.front.ask import Ask


def limited(max_context: int | None, known: int, num_blocks: int) -> int:
    runner: Any = SimpleNamespace(
        num_blocks=num_blocks, block_size=16, card=SimpleNamespace(max_context=known, name="it")
    )
    config = Config(schedule=ScheduleConfig(max_context=max_context))
    return _limits(config, runner).max_context


def test_the_context_is_the_least_of_model_setting_and_pool(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert limited(None, known=8192, num_blocks=1000) == 8192
        assert limited(100, known=8192, num_blocks=1000) == 100
        assert not caplog.records
        assert limited(None, known=8192, num_blocks=4) == 64
        assert "64 tokens instead of 8192" in caplog.text
        caplog.clear()
        assert limited(9000, known=8192, num_blocks=1000) == 8192
        assert "max_context is 9000" in caplog.text


def test_a_pool_of_one_token_serves_nobody() -> None:
    runner: Any = SimpleNamespace(num_blocks=1, block_size=1, card=SimpleNamespace(max_context=10, name="it"))
    with pytest.raises(ConfigError, match="at least 2"):
        _limits(Config(), runner)


def test_effective_settings(llm: LLM) -> None:
    found = llm.assembly.effective
    assert found["model"] == "SmolLM2-135M-Instruct"
    assert (found["num_blocks"], found["kv_tokens"], found["max_context"]) == (400, 6400, 1024)
    assert found["kv_bytes"] == 400 * llm.assembly.block_bytes
    assert "auto" not in found.values()
    assert found["recall"] is True


def test_where_nothing_is_remembered(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = llm.assembly.runner
    tokenizer, room = llm.assembly.front.tokenizer, llm.assembly.limits
    off = Config(cache=CacheConfig(cache=False))
    assert [_served(config, runner, tokenizer, room).recall.on for config in (Config(), off)] == [True, False]
    assert not caplog.records
    monkeypatch.setattr(tokenizer, "borders", None)
    assert not _served(Config(), runner, tokenizer, room).recall.on
    assert "answers that come back are tokenised again" in caplog.text


def test_a_chat_recalls_its_answers(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Write a word in each of five languages."}]
    first = llm.chat(messages, max_tokens=20, temperature=1.0, seed=3)
    more = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    again = llm.chat(more, max_tokens=1)
    assert (first.recalled_tokens, again.recalled_tokens > 0) == (0, True)
    assert again.cached_tokens >= (first.prompt_tokens + first.completion_tokens - 1) // 16 * 16


async def test_clients_that_leave_early_give_everything_back(llm: LLM) -> None:
    front, worker = llm.assembly.front, llm.assembly.worker

    async def leave_after(pieces: int) -> None:
        seen = 0
        async for _ in front.submit(Ask(prompt="Tell me a very long story about", max_tokens=900, ignore_eos=True)):
            seen += 1
            if seen > pieces:
                break

    await asyncio.gather(*(leave_after(n) for n in range(4)))
    for _ in range(500):
        if worker.state().running == worker.state().waiting == 0:
            break
        await asyncio.sleep(0.01)
    pool = worker.state().pool
    assert (pool.held, pool.free + pool.cached) == (0, pool.total)
    worker.check()


async def test_async_and_sync_give_the_same_text(llm: LLM) -> None:
    ask = Ask(prompt="The colours of the rainbow are", max_tokens=10, stop=("\n",))
    front = llm.assembly.front
    pieces = [piece async for piece in front.submit(ask)]
    again = await asyncio.to_thread(lambda: list(front.submit(ask)))
    assert "".join(piece.text for piece in pieces) == "".join(piece.text for piece in again)
    assert pieces[-1].finish == again[-1].finish


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_seed_that_is_accepted_draws(llm: LLM, seed: int) -> None:
    assert len(llm.generate("A", max_tokens=2, temperature=2.0, top_k=5, seed=seed, ignore_eos=True)[0].token_ids) == 2
