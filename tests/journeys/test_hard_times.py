"""Small pool, full queue, dead engine: refusals with their numbers, and counters that tell the truth."""

import threading
from typing import Any

import httpx

from tests.journeys.conftest import Running

ASK: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "temperature": 0}


def test_a_full_queue_is_a_429_with_retry_after(small: Running) -> None:
    statuses: list[int] = []
    after: list[str | None] = []

    def ask(number: int) -> None:
        response = small.post("/v1/completions", {"prompt": f"Number {number} is", **ASK})
        statuses.append(response.status_code)
        after.append(response.headers.get("retry-after"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 5
    assert all(
        (status == 429) == (wait is not None and int(wait) >= 1) for status, wait in zip(statuses, after, strict=True)
    )
    small.drained()
    rows = small.metrics()
    assert rows["foreword_requests_refused_total{status=429}"] == statuses.count(429)
    assert rows["foreword_requests_finished_total{finish=length}"] == statuses.count(200)


def test_what_can_never_fit_is_refused_with_its_numbers(small: Running) -> None:
    response = small.post("/v1/completions", {"prompt": "word " * 300})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert "96" in error["message"]  # six blocks of 16
    response = small.post("/v1/completions", {"prompt": "word", "max_tokens": 96})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    response = small.post("/v1/completions", {"prompt": [1, 2, 10**6]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert small.post("/v1/completions", {"prompt": "word", "max_tokens": 1}).status_code == 200
    small.drained()


def test_preempted_work_is_no_hit(small: Running) -> None:
    """Two answers outgrow the pool together: one is put aside and computed again, and nothing calls that cached."""
    prompts = ["Oak, elm and", "The first of"]
    replies: list[dict[str, Any]] = []

    def ask(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "cache": {"report": True}}
        replies.append(small.post("/v1/completions", body).json())

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    small.drained()
    rows = small.metrics()
    assert rows["foreword_preemptions_total"] >= 1
    assert rows["foreword_prompt_tokens_cached_total"] == 0
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, 0]
    assert rows["foreword_prompt_tokens_computed_total"] == sum(reply["usage"]["prompt_tokens"] for reply in replies)
    again = sum(reply["cache"]["recomputed_tokens"] for reply in replies)
    assert rows["foreword_tokens_recomputed_total"] == again


def test_a_dead_engine_answers_503(small: Running) -> None:
    def die() -> None:
        raise RuntimeError("the test ends this engine")

    assert small.get("/health").status_code == 200
    results: list[httpx.Response] = []
    body = {"prompt": "A long story about", "max_tokens": 80, "ignore_eos": True}
    thread = threading.Thread(target=lambda: results.append(small.post("/v1/completions", body)))
    thread.start()
    while small.get("/v1/cache").json()["requests"]["running"] == 0:
        pass
    small.assembly.worker._inbox.put(die)
    thread.join(30)
    assert results[0].status_code == 503
    assert small.get("/health").status_code == 503
    assert small.get("/ready").status_code == 503
    refused = small.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert small.get("/metrics").status_code == 200
