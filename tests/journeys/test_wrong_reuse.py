"""Kinds of wrong reuse that users of other servers met, over HTTP: crowds over one head, and those who hang up.

The bodies are the same in all of them; what a prompt gets alone from an empty cache is the truth.
"""

import random
import threading
from typing import Any

from tests.journeys.conftest import Running
from tests.journeys.leaving import leave

BLOCK = 16
HEAD = (
    "The harbour master of Skarvnes keeps a list of all ships. The Anna carries stone, the Berta carries letters, the "
    "Cora carries nothing but her captain and his dog. In winter they lie in the old harbour behind the mill, in "
    "summer at the long bridge. Whoever comes late pays two crowns, whoever comes early pays one. "
)
TAILS = [f"Question {i}: what does the {name} carry?" for i, name in enumerate(("Anna", "Berta", "Cora", "mill") * 4)]


def ask(server: Running, prompt: str, max_tokens: int = 4) -> dict[str, Any]:
    """A greedy answer with its log-probabilities, which must be equal as well."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    reply = server.post("/v1/completions", body).json()
    usage = reply["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"answer": reply["choices"][0], "cached": cached, "prompt": usage["prompt_tokens"]}


def all_at_once(server: Running, prompts: list[str]) -> list[dict[str, Any]]:
    """Answers to prompts that arrive together, in their order."""
    found: list[dict[str, Any]] = [{}] * len(prompts)

    def work(number: int) -> None:
        found[number] = ask(server, prompts[number])

    threads = [threading.Thread(target=work, args=[number]) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_wrong_reuse_and_concurrency_sixteen_at_once_over_one_cold_head(server: Running) -> None:
    prompts, flush = [HEAD + tail for tail in TAILS], server.assembly.worker.flush
    alone: list[dict[str, Any]] = []
    for prompt in prompts[:6]:
        flush()
        alone.append(ask(server, prompt))
    assert {reply["cached"] for reply in alone} == {0}
    flush()
    before = server.metrics()["foreword_prompt_tokens_computed_total"]
    together = all_at_once(server, prompts)
    computed = server.metrics()["foreword_prompt_tokens_computed_total"] - before
    assert [reply["answer"] for reply in together[:6]] == [reply["answer"] for reply in alone]
    head = len(server.assembly.front.tokenizer.encode(HEAD))
    tails = sum(reply["prompt"] - head for reply in together)
    assert computed <= 1.2 * head + tails + BLOCK
    assert computed == sum(reply["prompt"] - reply["cached"] for reply in together)
    assert sorted(reply["cached"] for reply in together)[1] >= head // BLOCK * BLOCK


def test_wrong_reuse_whoever_comes_after_one_that_hung_up(server: Running) -> None:
    draw, flush, prompt = random.Random(4), server.assembly.worker.flush, HEAD + HEAD[:150]
    flush()
    alone = ask(server, prompt)
    assert alone["cached"] == 0
    cached: list[int] = []
    for _ in range(8):
        flush()
        leave(server, {"prompt": prompt, "max_tokens": 20, "ignore_eos": True}, draw)
        again = ask(server, prompt)
        assert again["answer"] == alone["answer"]
        cached.append(again["cached"])
    assert max(cached) > 0, "nobody ever left anything behind"


def test_wrong_reuse_half_of_those_who_wait_hang_up(server: Running) -> None:
    """More at once than run at once; some leave while they are queued."""
    flush = server.assembly.worker.flush
    flush()
    alone = ask(server, HEAD + TAILS[0])
    flush()
    bodies = [{"prompt": HEAD + tail, "max_tokens": 8, "ignore_eos": True} for tail in TAILS]
    leavers = [threading.Thread(target=leave, args=[server, body, random.Random(i)]) for i, body in enumerate(bodies)]
    for thread in leavers:
        thread.start()
    probes = all_at_once(server, [HEAD + TAILS[0]] * 4)
    for thread in leavers:
        thread.join()
    assert all(probe["answer"] == alone["answer"] for probe in [*probes, ask(server, HEAD + TAILS[0])])
    assert max(probe["cached"] for probe in probes) > 0
