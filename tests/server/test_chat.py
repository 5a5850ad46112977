"""POST /chat: the plain form."""

import httpx
import pytest

from foreword.schedule.plan import Outcome, StepStats
from tests.server.fakes import World


async def test_answer(client: httpx.AsyncClient, world: World) -> None:
    world.metrics.observe(Outcome(0, (), StepStats(num_chunks=1, num_tokens=100)))
    world.metrics.observe_step(2.0, 0.0)
    for cached in (0, 8):
        reply = (await client.post("/chat", json={"prompt": "abcdefghij", "prefix_length": 8})).json()
        report = reply.pop("cache")
        assert reply == {
            "text": "hello",
            "prompt_tokens": 10,
            "cached_tokens": cached,
            "computed_tokens": 10 - cached,
            "completion_tokens": 5,
            "prefix_length": 8,
        }
        assert report["cached_tokens"] == report["at_token"] == report["tiers"]["device"] == cached
        assert report["saved"] == {"prefill_flops": 1000 * cached, "seconds": pytest.approx(0.02 * cached)}
        assert (report["where"] is None) == (report["reason"] == "complete")
        assert set(report["timings"]) == {
            "queue_s",
            "tokenize_s",
            "lookup_s",
            "fetch_s",
            "prefill_s",
            "first_token_s",
        }
    ask = world.front.asks[0]
    assert [caller.arrived_s for caller in world.front.callers] == [12.5, 12.5]
    assert (ask.prompt, ask.max_tokens, ask.temperature, ask.prefix_length) == ("abcdefghij", 64, 0.0, 8)


async def test_without_prefix_length(client: httpx.AsyncClient) -> None:
    reply = (await client.post("/chat", json={"prompt": "abc", "max_tokens": 2, "temperature": 0.5})).json()
    assert reply["prefix_length"] is None
    assert reply["text"] == "he"


async def test_a_prefix_beyond_the_prompt_is_a_422(client: httpx.AsyncClient) -> None:
    response = await client.post("/chat", json={"prompt": "abc", "prefix_length": 4})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "prefix_length"
    assert "the prompt has 3 tokens" in response.json()["error"]["message"]
    response = await client.post("/chat", json={"prompt": "abc", "cache": {"prefix_length": 4}})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "cache.prefix_length")


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": [1, 2]}, {"prompt": "a", "max_tokens": 0}])
async def test_bad_bodies(client: httpx.AsyncClient, body: object) -> None:
    assert (await client.post("/chat", json=body)).status_code == 400


async def test_what_other_routes_do_is_said(client: httpx.AsyncClient) -> None:
    response = await client.post("/chat", json={"prompt": "a b c", "stream": True})
    assert response.status_code == 422
    assert "use /v1/completions or /v1/chat/completions" in response.json()["error"]["message"]
