"""What the server says about itself."""

import httpx

from tests.server.fakes import World


async def test_health(client: httpx.AsyncClient, world: World) -> None:
    for path in ("/health", "/ready"):
        world.engine.alive = world.engine.ready = True
        response = await client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
        world.engine.alive = world.engine.ready = False
        response = await client.get(path)
        assert (response.status_code, response.json()) == (503, {"status": "engine_dead"})


async def test_not_ready_is_not_dead(client: httpx.AsyncClient, world: World) -> None:
    world.engine.ready = False
    assert (await client.get("/health")).status_code == 200
    response = await client.get("/ready")
    assert (response.status_code, response.json()) == (503, {"status": "not_ready"})
    world.engine.ready, world.warm = True, False  # --warm has prompts left
    assert (await client.get("/ready")).status_code == 503
    world.warm = True
    assert (await client.get("/ready")).status_code == 200


async def test_models(client: httpx.AsyncClient) -> None:
    reply = (await client.get("/v1/models")).json()
    assert reply["object"] == "list"
    assert [card["id"] for card in reply["data"]] == ["tiny", "alias/tiny"]
    assert (await client.get("/v1/models/alias/tiny")).json() == reply["data"][1]
    assert set(reply["data"][0]) == {"id", "object", "created", "owned_by"}


async def test_cache(client: httpx.AsyncClient, world: World) -> None:
    reply = (await client.get("/v1/cache")).json()
    settings, totals = reply.pop("settings"), reply["totals"]
    assert totals["prompt_tokens"] == {"cached": 0, "computed": 0}
    assert totals["ttft"]["partial"] == {"requests": 0, "seconds": 0.0}
    assert len(totals["reasons"]) == 14
    assert reply == {
        "object": "cache",
        "model": "tiny",
        "enabled": True,
        "cacheable": True,
        "not_cacheable": None,
        "block_size": 4,
        "blocks": {"capacity": 10, "free": 5, "cached": 3, "held": 2, "pinned": 0, "pin_budget": 2},
        "capacity_tokens": 40,
        "models": [{"id": "tiny", "cacheable": True, "not_cacheable": None, "namespace": "old"}],
        "departures": {},
        "totals": totals,
        "requests": {"waiting": 1, "running": 2},
        "tenants": None,
    }
    assert settings["schedule"]["max_running"] == 64
    world.engine.caching = False
    assert (await client.get("/v1/cache")).json()["enabled"] is False
    assert settings["effective"] == {"device": "cpu", "root": "old"}


async def test_metrics(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'foreword_blocks{state="held"} 2.0' in response.text
    assert "foreword_prompt_tokens_cached_total 0.0" in response.text


async def test_metrics_know_what_the_engine_does_not(client: httpx.AsyncClient, world: World) -> None:
    rows = (await client.get("/metrics")).text.splitlines()
    assert {"foreword_ready 1.0", "foreword_volatile_spans 1.0", "foreword_volatile_tokens 2772.0"} <= set(rows)
    for world.engine.ready, world.warm in ((False, True), (True, False)):
        assert "foreword_ready 0.0" in (await client.get("/metrics")).text.splitlines()


async def test_the_root_names_the_routes(client: httpx.AsyncClient) -> None:
    reply = (await client.get("/")).json()
    assert reply["name"] == "foreword"
    assert {"POST /v1/chat/completions", "GET /v1/cache/public", "POST /v1/cache/flush"} <= set(reply["routes"])
