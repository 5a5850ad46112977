"""The cache's verbs over HTTP: their forms, who may do what to whom, and what a wrong one is told."""

import json
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest

from foreword.base.ids import RequestId
from foreword.cache.identity import ALONE
from tests.server.fakes import LIVE, World

BLOCK = "01" * 32


async def test_lookup(client: httpx.AsyncClient, world: World) -> None:
    reply = (await client.post("/v1/cache/lookup", json={"prompt": "abcdefghi"})).json()
    assert reply == {
        "object": "cache.lookup",
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "reason": "evicted",
        "at_token": 4,
        "left": {"cause": "pressure", "ago_s": 2.5},
        "where": {
            "message": 1,
            "role": "user",
            "tool": None,
            "offset": 3,
            "cached": "the 14:02",
            "prompt": "the 14:03",
        },
    }
    assert world.keeper.calls == [("lookup", "abcdefghi", ALONE.name)]
    assert world.front.asks == []


async def test_warm_takes_every_form_of_a_prompt(client: httpx.AsyncClient, world: World) -> None:
    body = {"ids": [1, 2, 3], "ttl": 60, "priority": 80, "key": "nightly"}
    reply = (await client.post("/v1/cache/warm", json=body)).json()
    assert (reply["object"], reply["prompt_tokens"], reply["cached_tokens"]) == ("cache.warmed", 3, 0)
    assert "text" not in reply
    messages = [{"role": "system", "content": "be kind"}]
    assert (await client.post("/v1/cache/warm", json={"messages": messages})).status_code == 200
    first, second = world.keeper.calls
    assert first == ("warm", (1, 2, 3), ALONE.name, 60, 80, "nightly")
    assert second[1].messages == tuple(messages)  # pyright: ignore[reportAttributeAccessIssue]


async def test_every_verb_takes_tools_with_messages(client: httpx.AsyncClient, world: World) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    for verb in ("lookup", "warm", "pin", "unpin", "flush"):
        assert (await client.post(f"/v1/cache/{verb}", json=body)).status_code == 200
        assert json.dumps(world.keeper.calls[-1][1].tools) == json.dumps(tools)  # pyright: ignore[reportAttributeAccessIssue]
        lonely = await client.post(f"/v1/cache/{verb}", json={"prompt": "hi", "tools": tools})
        assert (lonely.status_code, lonely.json()["error"]["param"]) == (400, "tools")
        wrong = await client.post(f"/v1/cache/{verb}", json={**body, "tools": [{}]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, "tools.0.type")


async def test_pin_unpin_and_flush(client: httpx.AsyncClient, world: World) -> None:
    reply = (await client.post("/v1/cache/pin", json={"block": BLOCK, "ttl": 5})).json()
    assert reply == {
        "object": "cache.pinned",
        "tenant": ALONE.name,
        "blocks": 2,
        "cached": 1,
        "pinned": 2,
        "budget": 25,
    }
    assert (await client.post("/v1/cache/unpin", json={"prompt": "a head"})).json()["unpinned"] == 2
    for body in ({"prompt": "a head"}, {}, {"model": "tiny"}):
        reply = (await client.post("/v1/cache/flush", json=body)).json()
        assert reply == {"object": "cache.flushed", "dropped": 3, "still_held": 1}
    assert (await client.post("/v1/cache/flush")).status_code == 200
    block = bytes.fromhex(BLOCK)
    assert world.keeper.calls == [
        ("pin", block, ALONE.name, 5),
        ("unpin", "a head", ALONE.name),
        ("flush", "a head", ALONE.name),
        ("flush", None, None),
        ("flush", None, None),
        ("flush", None, None),
    ]


async def test_tree(client: httpx.AsyncClient, world: World) -> None:
    reply = (await client.get(f"/v1/cache/tree?start={BLOCK}&limit=7")).json()
    assert reply == {
        "object": "cache.tree",
        "block_size": 4,
        "more": False,
        "nodes": [
            {
                "block": BLOCK,
                "parent": None,
                "owner": "red",
                "tokens": 12,
                "text": "hello",
                "hits": 5,
                "idle_s": 1.5,
                "held": False,
                "pinned": True,
                "priority": 50,
                "ttl": None,
                "children": 2,
            }
        ],
    }
    assert world.keeper.calls == [("tree", None, bytes.fromhex(BLOCK), 7, "used")]
    assert (await client.get("/v1/cache/tree?order=hits")).status_code == 200
    assert world.keeper.calls[-1] == ("tree", None, None, 100, "hits")
    for query in ("limit=0", "limit=1001", "start=zz", "order=size"):
        response = await client.get(f"/v1/cache/tree?{query}")
        assert response.status_code == 422
        assert response.json()["error"]["param"] == query.split("=")[0]


async def test_requests(client: httpx.AsyncClient, world: World) -> None:
    assert (await client.get("/v1/cache/requests")).json() == {"object": "cache.requests", "requests": [], "total": 0}
    world.engine.requests = [LIVE, replace(LIVE, id=RequestId("r2"))]
    reply = (await client.get("/v1/cache/requests?limit=1")).json()
    assert (reply["requests"], reply["total"]) == ([asdict(LIVE)], 2)
    for query in ("limit=0", "limit=1001", "phase=prefill"):
        response = await client.get(f"/v1/cache/requests?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (422, query.split("=")[0])


async def test_advice(client: httpx.AsyncClient, world: World) -> None:
    reply = (await client.get("/v1/cache/advice")).json()
    assert reply == {
        "object": "cache.advice",
        "advice": [
            {
                "tenant": "red",
                "kind": "changed",
                "message": 0,
                "role": "system",
                "tool": None,
                "offset": 7,
                "end": 12,
                "at_token": 5,
                "before": "14:02",
                "now": "14:03",
                "calls": 4,
                "tokens_per_call": 693,
                "text": "Message 0 (system), characters 7 to 11, changed.",
            }
        ],
    }
    assert world.keeper.calls == [("advice", None)]
    response = await client.get("/v1/cache/advice?tennant=red")
    assert (response.status_code, response.json()["error"]["param"]) == (422, "tennant")
    assert (await client.get("/v1/cache/advice?tenant=red")).status_code == 404


@pytest.mark.parametrize(
    ("verb", "body", "told"),
    [
        ("lookup", {}, (400, None, "give one of prompt, ids, messages")),
        ("lookup", {"prompt": "a", "ids": [1]}, (400, "ids", "ids: prompt and ids are given; give only one of")),
        ("lookup", {"promt": "a"}, (422, "promt", "did you mean 'prompt'?")),
        ("warm", {"prompt": "a", "prioritty": 3}, (422, "prioritty", "did you mean 'priority'?")),
        ("warm", {"prompt": "a", "ttl": 0}, (400, "ttl", "greater than 0")),
        ("warm", {"prompt": "a", "block": BLOCK}, (422, "block", "known are")),
        ("pin", {"prompt": "too much"}, (400, "prompt", "25 may be")),
        ("pin", {}, (400, None, "give one of prompt, ids, messages, block")),
        ("pin", {"block": "12"}, (400, "block", "block is '12': a block is 64 hex digits, as GET /v1/cache/tree")),
        ("unpin", {"block": "00" * 32 + "\n"}, (400, "block", "64 hex digits")),
        ("pin", {"prompt": "a", "ttl": -1}, (400, "ttl", "greater than 0")),
        ("unpin", {"prompt": "a", "ttl": 1}, (422, "ttl", "known are")),
        ("flush", {"prompt": "a", "block": BLOCK}, (400, "block", "give only one of")),
        ("flush", {"block": "00" * 32}, (404, "block", "no such block")),
        ("flush", {"model": "other"}, (404, "model", "does not exist here")),
        ("flush", {"tenant": "nobody"}, (404, "tenant", "no such tenant")),
    ],
)
async def test_wrong_forms(client: httpx.AsyncClient, verb: str, body: Any, told: tuple[int, str, str]) -> None:
    response = await client.post(f"/v1/cache/{verb}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == told[:2], error
    assert told[2] in error["message"]
