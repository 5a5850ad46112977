"""Answers that stop anywhere, on the embedded model: what stays behind is whole and true, and all of it is reused."""

import pytest

from foreword import LLM
from foreword.front.ask import Ask, Caller

BLOCK = 16
TEXT = (
    "The lighthouse keeper wrote down every storm, every ship and every bird that passed the tower. In the winter of "
    "that year there were more birds than ships, and in the spring there was nothing at all but fog."
)
WISHES = {"temperature": 0, "ignore_eos": True, "logprobs": 3}


def end(llm: LLM, prompt: list[int], how: str, text: str) -> str | None:
    """One answer that ends in this way after five tokens or a few more; its finish reason."""
    if how == "length":
        return llm.generate(prompt, max_tokens=5, ignore_eos=True, temperature=0)[0].finish_reason
    if how == "stop string":
        return llm.generate(prompt, max_tokens=40, ignore_eos=True, temperature=0, stop=text)[0].finish_reason
    caller = Caller(arrived_s=llm.assembly.worker.now())
    answer = llm.assembly.front.submit(
        Ask(prompt=tuple(prompt), max_tokens=400, ignore_eos=True, temperature=0), caller
    )
    num, last = 0, None
    for piece in answer:
        num, last = num + len(piece.ids), piece
        if num == 5:
            answer.cancel()
    return None if last is None else last.finish


@pytest.mark.parametrize("length", [BLOCK * 2 - 1, BLOCK * 2, BLOCK * 2 + 1])
@pytest.mark.parametrize(("how", "finish"), [("length", "length"), ("stop string", "stop"), ("cancel", "cancelled")])
def test_the_same_again_and_a_strict_prefix_of_it(llm: LLM, how: str, finish: str, length: int) -> None:
    prompt = list(llm.assembly.front.served.tokenizer.encode(TEXT))[:length]
    flush = llm.assembly.worker.flush
    flush()
    cold = llm.generate(prompt, max_tokens=8, **WISHES)[0]
    flush()
    cold_prefix = llm.generate(prompt[:-6], max_tokens=3, **WISHES)[0]
    assert cold.cached_tokens == cold_prefix.cached_tokens == 0
    flush()
    assert end(llm, prompt, how, cold.text[8:12]) == finish
    warm_prefix = llm.generate(prompt[:-6], max_tokens=3, **WISHES)[0]
    warm = llm.generate(prompt, max_tokens=8, **WISHES)[0]
    assert warm_prefix.cached_tokens == length - 7
    assert warm.cached_tokens == length - 1
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert (warm_prefix.token_ids, warm_prefix.logprobs) == (cold_prefix.token_ids, cold_prefix.logprobs)
    llm.assembly.worker.check()


def test_an_end_id(llm: LLM) -> None:
    llm.assembly.worker.flush()
    question = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    cold = llm.chat([question], max_tokens=30, logprobs=3, temperature=0)
    warm = llm.chat([question], max_tokens=30, logprobs=3, temperature=0)
    assert cold.finish_reason == warm.finish_reason == "stop"
    assert cold.cached_tokens == 0
    computed = cold.prompt_tokens + cold.completion_tokens - 1
    assert warm.cached_tokens == min(computed // BLOCK * BLOCK, cold.prompt_tokens - 1) > 0
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
