"""Many at once: no answer shows another's secret, those who leave leave nothing behind, the books agree."""

import asyncio
import random
import threading
from typing import Any

import httpx

from tests.journeys.conftest import Running
from tests.journeys.leaving import leave

NUM_CANARIES = 200
HEAD = "Each guest of the house has a secret word and repeats it when asked. The porter knows all guests by number. "


def secrets(seed: int) -> list[str]:
    """Words that no model says by itself, no two alike."""
    draw = random.Random(seed)
    return ["".join(draw.choices("BCDFGHJKLMNPQRSTVWXZ", k=6)) for _ in range(NUM_CANARIES)]


async def _ask_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, timeout=170, limits=limits) as client:
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert all(reply.status_code == 200 for reply in replies)
    return [reply.json() for reply in replies]


async def test_canaries(server: Running) -> None:
    before = server.metrics()
    words = secrets(1)
    bodies = [
        {
            "prompt": f"{HEAD}Guest {number}: my secret word is {word}.\nGuest {number}: my secret word is",
            "max_tokens": 6,
            "temperature": 0,
            "stop": ["\n"],
        }
        for number, word in enumerate(words)
    ]
    replies = await _ask_all(server.url, bodies)
    own = 0
    for number, reply in enumerate(replies):
        text = reply["choices"][0]["text"]
        own += words[number] in text
        strangers = [word for word in words if word != words[number] and word in text]
        assert strangers == [], f"guest {number} was told {strangers} in {text!r}"
    assert own > NUM_CANARIES // 2, "the test proves nothing if nobody's own secret comes back"
    server.drained()
    after = server.metrics()
    cached = sum(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies)
    prompt = sum(reply["usage"]["prompt_tokens"] for reply in replies)
    assert after["foreword_prompt_tokens_cached_total"] - before["foreword_prompt_tokens_cached_total"] == cached
    computed = after["foreword_prompt_tokens_computed_total"] - before["foreword_prompt_tokens_computed_total"]
    assert computed == prompt - cached
    assert cached > prompt * 0.3
    lookups = sum(after[key] - before[key] for key in after if key.startswith("foreword_lookups_total"))
    assert lookups == NUM_CANARIES


def chapter(draw: random.Random) -> dict[str, Any]:
    """A prompt that shares its beginning with some others."""
    text = f"Chapter {draw.randrange(40)}. " + "It was a dark and stormy night on the lake. " * draw.randrange(1, 9)
    return {"prompt": text, "max_tokens": 30, "ignore_eos": True}


def _leave_many(server: Running, num: int) -> None:
    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(num // 8):
            leave(server, chapter(draw), draw)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_abort_leak_those_who_leave_leave_nothing_behind(server: Running) -> None:
    prompt = "A control that runs beside those who leave, and whose answer may not change, whatever they do: the sea is"
    ask = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    expected = server.post("/v1/completions", ask).json()["choices"][0]["text"]
    _leave_many(server, 40)
    assert server.post("/v1/completions", ask).json()["choices"][0]["text"] == expected
    server.drained()


def test_a_client_that_leaves_stops_the_work_within_a_step(server: Running) -> None:
    body = {"prompt": "Tell me everything about", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
    server.drained(5)
    rows = server.metrics()
    generated = rows["foreword_tokens_generated_total"]
    assert rows["foreword_requests_finished_total{finish=cancelled}"] >= 1
    assert server.metrics()["foreword_tokens_generated_total"] == generated


def test_work_done_before_leaving_stays(server: Running) -> None:
    prompt = "Of all the gardens that we saw in the spring of that year the one behind the mill was the finest. " * 2
    body = {"prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    server.drained()
    usage = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert (usage["prompt_tokens"] - 1) // 16 * 16 <= cached < usage["prompt_tokens"]
