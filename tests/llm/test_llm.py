"""The library face on the real embedded model."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

import foreword
from foreword import LLM, ConfigError, RequestError
from foreword.base.errors import Unavailable

HEAD = "The following is a list of countries with their capitals, written by a careful geographer. " * 4


def test_importing_foreword_loads_no_torch() -> None:
    code = "import sys; from foreword import LLM, Result; import foreword.cli.verbs; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'foreword.llm'" in done.stdout
    assert "'torch'" not in done.stdout
    assert "'transformers'" not in done.stdout


def test_the_public_names() -> None:
    assert set(foreword.__all__) <= set(dir(foreword))
    for name in foreword.__all__:
        assert getattr(foreword, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        foreword.nothing  # noqa: B018


def test_one_prompt(llm: LLM) -> None:
    [result] = llm.generate("The capital of France is", max_tokens=4)
    assert result.text.startswith(" Paris")
    assert result.finish_reason == "length"
    assert result.completion_tokens == len(result.token_ids) == 4
    assert result.cached_tokens + result.computed_tokens == result.prompt_tokens == 5
    assert result.logprobs is None
    parts = (result.queue_s, result.tokenize_s, result.lookup_s, result.prefill_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(result.first_token_s, abs=1e-4)
    assert result.first_token_s > result.prefill_s > 0


def test_prompts_that_share_a_prefix(llm: LLM) -> None:
    prompts = [f"{HEAD}The capital of {name} is" for name in ("France", "Italy", "Spain", "Greece", "Japan", "Egypt")]
    together = llm.generate(prompts, max_tokens=3)
    assert [result.text.split()[0].strip(".,") for result in together][:3] == ["Paris", "Rome", "Madrid"]
    assert sum(result.cached_tokens > 0 for result in together) >= 5
    again = llm.generate(prompts, max_tokens=3)
    assert [result.token_ids for result in again] == [result.token_ids for result in together]
    assert all(result.cached_tokens >= result.prompt_tokens - 16 for result in again)


def test_more_prompts_than_the_queue_takes(llm: LLM) -> None:
    results = llm.generate([f"Count: {i}" for i in range(30)], max_tokens=1)
    assert len(results) == 30
    assert [result.prompt_tokens for result in results] == [
        len(llm.assembly.front.tokenizer.encode(f"Count: {i}")) for i in range(30)
    ]


def test_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    text = "Water boils at"
    ids = llm.assembly.front.tokenizer.encode(text)
    by_text = llm.generate(text, max_tokens=4)[0]
    assert [result.token_ids for result in llm.generate([ids, tuple(ids)], max_tokens=4)] == [by_text.token_ids] * 2
    assert llm.generate(ids, max_tokens=4)[0].token_ids == by_text.token_ids
    rows: Any = numpy.array([ids, ids])
    assert llm.generate(rows, max_tokens=4)[1].token_ids == by_text.token_ids
    assert llm.generate([]) == []


def test_prefix_length_bounds_what_is_read(llm: LLM) -> None:
    prompt = HEAD + "prefix length test"
    llm.generate(prompt, max_tokens=1)
    assert llm.generate(prompt, max_tokens=1)[0].cached_tokens > 48
    assert llm.generate(prompt, max_tokens=1, prefix_length=40)[0].cached_tokens <= 40
    assert llm.generate(prompt, max_tokens=1, prefix_length=0)[0].cached_tokens == 0


def test_stop_strings_and_log_probabilities(llm: LLM) -> None:
    whole = llm.generate("One two three four five", max_tokens=12)[0]
    stop = whole.text.strip()[3:5]
    result = llm.generate("One two three four five", max_tokens=12, stop=stop, logprobs=2)[0]
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids) == result.completion_tokens < 12
    assert all(token.logprob is not None and len(token.top) == 2 for token in result.logprobs)


def test_a_seed_repeats_itself(llm: LLM) -> None:
    wishes = {"max_tokens": 8, "temperature": 1.0}
    one, two, three = (llm.generate("Once", seed=seed, **wishes)[0].token_ids for seed in (1, 1, 2))
    assert one == two != three


def test_chat(llm: LLM) -> None:
    question = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    result = llm.chat([question], max_tokens=20)
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] == 2
    more = llm.chat([question, {"role": "assistant", "content": result.text}, question], max_tokens=1)
    assert more.cached_tokens >= 32


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": None}, "stop"),
        ({"maxtokens": 1}, "maxtokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"cache": True}, "cache"),
        ({"cache": {"report": "yes"}}, "report"),
        ({"cache": {3: True}}, "cache.3"),
    ],
)
def test_wrong_wishes(llm: LLM, wishes: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", "x"], **wishes)  # pyright: ignore[reportArgumentType]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (None, "prompts"),
        (5, "prompts"),
        (b"bytes", "prompts"),
        ({"role": "user", "content": "hi"}, "prompts"),
        ([{"role": "user", "content": "hi"}], "prompts.0"),
        (["fine", None], "prompts.1"),
        ([[1, 2], 3.5], "prompts.1"),
        ([[1, "x"]], "prompt"),
    ],
    ids=str,
)
def test_wrong_prompts(llm: LLM, prompts: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, max_tokens=1)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        (None, "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (["hi"], "messages.0"),
        ([{"role": "usr", "content": "hi"}], "messages.0.role"),
        ([{"role": "user", "text": "hi"}], "messages.0.text"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
    ],
    ids=str,
)
def test_wrong_messages(llm: LLM, messages: Any, field: str) -> None:
    verbs: list[Callable[[Any], object]] = [llm.chat]
    if isinstance(messages, list) and isinstance(messages[0], dict):  # the others take a prompt in any form
        verbs += [llm.lookup, llm.warm, llm.pin, llm.unpin, llm.flush]
    for verb in verbs:
        with pytest.raises(RequestError) as caught:
            verb(messages)
        assert caught.value.field == field


@pytest.mark.parametrize("prompt", [5, {"role": "user", "content": "hi"}, b"x"], ids=str)
def test_wrong_prefixes(llm: LLM, prompt: Any) -> None:
    for verb in (llm.lookup, llm.warm, llm.pin, llm.unpin, llm.flush):
        with pytest.raises(RequestError, match="list of messages") as caught:
            verb(prompt)
        assert caught.value.field == "prompt"
    for ttl in ("long", 0, -1):
        with pytest.raises(RequestError) as caught:
            llm.pin(HEAD, ttl=ttl)  # pyright: ignore[reportArgumentType]
        assert caught.value.field == "ttl"


def test_the_newer_name_of_system(llm: LLM) -> None:
    ask = {"role": "user", "content": "Who are you?"}
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    old = llm.chat([{"role": "system", "content": "Be\nbrief."}, ask], max_tokens=4)
    new = llm.chat([{"role": "developer", "content": parts}, ask], max_tokens=4)
    assert new.token_ids == old.token_ids
    assert new.prompt_tokens == old.prompt_tokens
    assert new.cached_tokens == new.prompt_tokens // 16 * 16 > 0


def test_one_wrong_prompt_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["a long one", ""], max_tokens=500, ignore_eos=True)
    llm.generate("settle", max_tokens=1)
    llm.assembly.worker.check()


def test_many_threads(llm: LLM) -> None:
    alone = [llm.generate(f"Number {i} is", max_tokens=3)[0].token_ids for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: llm.generate(f"Number {i} is", max_tokens=3)[0].token_ids, range(4)))
    assert found == alone


def test_the_pool_drains(llm: LLM) -> None:
    llm.generate(["drain one", "drain two"], max_tokens=2)
    pool = llm.assembly.worker.state().pool
    assert pool.held == 0
    assert pool.free + pool.cached == pool.total == 400
    llm.assembly.worker.check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocksize": 16}, "did you mean block_size"),
        ({"port": 1}, "setting of the server"),
        ({"block_size": "16"}, "block_size is '16'; it must be int"),
        ({"cache": 1}, "cache is 1; it must be bool"),
        ({"max_running": True}, "max_running"),
        ({"dtype": "float64"}, "choose from auto, float32"),
        ({"kv_cache": "much"}, "kv_cache"),
        ({"max_batch_tokens": 8}, "max_batch_tokens"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)


def test_a_closed_llm_takes_nothing() -> None:
    closed = LLM(kv_cache="8")
    assert closed.assembly.limits.max_context == 128
    closed.close()
    closed.close()
    ask = [{"role": "user", "content": "x"}]
    for call in (
        lambda: closed.generate("x"),
        lambda: closed.chat(ask),
        lambda: closed.lookup("x"),
        lambda: closed.warm("x"),
        lambda: closed.pin("x"),
        lambda: closed.unpin("x"),
        closed.flush,
        closed.reload,
    ):
        with pytest.raises(Unavailable, match="this LLM is closed"):
            call()
