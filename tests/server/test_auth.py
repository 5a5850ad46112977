"""Who may come in, as whom, and what each sees. The key says it and nothing else does."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from foreword.base.errors import ConfigError, TenantLimit
from foreword.cache.identity import ALONE, Tenant
from foreword.engine.state import TenantState
from foreword.front.ask import Ask, Caller, Conversation
from foreword.schedule.admission import Limits
from foreword.schedule.plan import Outcome, PromptTokens, Sample, StepStats, TokenEvent
from foreword.server import KeyFile, mark_heads, read_heads
from foreword.server.auth import change_keys, new_key
from foreword.server.warmup import read_warm
from tests.server.fakes import BOUNDS, LIVE, FakeAnswer, FakeFront, FakeOperator, World
from tests.telemetry.test_metrics import first, usage

ADMIN = {
    ("GET", "/metrics"),
    ("POST", "/v1/cache/pin"),
    ("POST", "/v1/cache/unpin"),
    ("GET", "/v1/cache/public"),
    ("POST", "/v1/cache/public"),
    ("POST", "/v1/models/reload"),
}
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/chat", {"prompt": "abc"}),
]


class House:
    """A server with keys: red has a plain and an admin one, blue a plain one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.json"
        self.red, self.boss, self.blue = (self.add("red"), self.add("red", admin=True), self.add("blue"))
        self.world = World(keys=KeyFile(self.path))
        limits = BOUNDS.limits
        self.world.limits = Limits(
            num_blocks=100,
            block_size=limits.block_size,
            max_context=limits.max_context,
            shares={"red": 20, "blue": 10},
            public_blocks=25,
        )

    def add(self, tenant: str, *, admin: bool = False) -> str:
        secret, key = new_key(tenant, admin=admin)
        change_keys(self.path, lambda keys: keys.with_key(key, None, 5))
        return secret


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.fixture
async def red(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with house.world.client(house.red) as client:
        yield client


@pytest.fixture
async def boss(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with house.world.client(house.boss) as client:
        yield client


@pytest.fixture
async def nobody(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with house.world.client() as client:
        yield client


def routes(world: World) -> list[tuple[str, str]]:
    """Every method and path that the app serves."""
    found: list[tuple[str, str]] = []
    for route in world.app().routes:
        assert isinstance(route, Route)
        path = route.path.replace("{model:path}", "tiny")
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


async def test_without_a_key_only_health_and_ready_answer(nobody: httpx.AsyncClient, house: House) -> None:
    everything = routes(house.world)
    assert len(everything) >= 14
    for method, path in [*everything, ("GET", "/nowhere"), ("GET", "/metrics/"), ("GET", "//health")]:
        response = await nobody.request(method, path)
        if path == "/dashboard/{name}":
            assert response.status_code == 404
            continue
        if path in ("/health", "/ready", "/dashboard"):
            assert response.status_code == 200
            continue
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            error = response.json()["error"]
            assert (error["type"], error["code"], error["param"]) == (
                "invalid_request_error",
                "invalid_api_key",
                None,
            )
    assert house.world.front.asks == []


async def test_wrong_credentials(nobody: httpx.AsyncClient, house: House) -> None:
    key = house.red
    wrong: list[list[tuple[str, str]]] = [
        [("authorization", key)],
        [("authorization", f"Basic {key}")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {key}x")],
        [("authorization", f"Bearer {key[:-1]}")],
        [("authorization", f"Bearer {key.upper()}")],
        [("authorization", f"Bearer {house.world.keys.keys.keys[0].sha256}")],  # pyright: ignore[reportOptionalMemberAccess]
        [("authorization", f"Bearer {key}"), ("authorization", f"Bearer {house.blue}")],
        [("x-api-key", key)],
        [("cookie", f"key={key}")],
    ]
    for headers in wrong:
        response = await nobody.post("/chat", json={"prompt": "a"}, headers=headers)
        assert response.status_code == 401, headers
        assert key not in response.text
        assert ("2 Authorization headers: send one" in response.text) == (headers == wrong[8])
    assert (await nobody.post(f"/chat?key={key}", json={"prompt": "a"})).status_code == 401
    for scheme in ("Bearer", "bearer"):
        response = await nobody.post("/chat", json={"prompt": "a"}, headers={"authorization": f"{scheme} {key}"})
        assert response.status_code == 200
    assert (
        'foreword_requests_refused_total{status="401"} 12.0'
        in house.world.metrics.render(house.world.engine.state()).decode()
    )


async def test_a_stranger_is_turned_away_before_the_body_is_read(nobody: httpx.AsyncClient) -> None:
    response = await nobody.post("/v1/completions", content=b"x" * 200_000)
    assert response.status_code == 401


async def test_routes_for_operators(red: httpx.AsyncClient, boss: httpx.AsyncClient, house: House) -> None:
    assert set(routes(house.world)) >= ADMIN
    for method, path in sorted(ADMIN):
        response = await red.request(method, path)
        assert response.status_code == 403, path
        assert response.json()["error"]["code"] == "admin_key_required"
    assert house.world.operator == FakeOperator()
    for method, path in sorted(ADMIN):
        body = (
            {"prompt": "a head for all"} if path in ("/v1/cache/public", "/v1/cache/pin", "/v1/cache/unpin") else None
        )
        assert (await boss.request(method, path, json=body)).status_code == 200, path


async def test_a_server_without_keys_serves_everybody() -> None:
    world = World()
    async with world.client() as client:
        for method, path in sorted(ADMIN - {("POST", "/v1/cache/public")}):
            body = {"prompt": "a head"} if path in ("/v1/cache/pin", "/v1/cache/unpin") else None
            assert (await client.request(method, path, json=body)).status_code == 200
        response = await client.post("/v1/cache/public", json={"prompt": "a head"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "no_tenants")
        assert (await client.post("/chat", json={"prompt": "a"})).status_code == 200
    assert world.front.callers == [Caller(tenant=ALONE, arrived_s=12.5)]


@pytest.mark.parametrize(("path", "body"), ASKS)
async def test_the_key_alone_says_which_tenant_it_is(house: House, path: str, body: dict[str, Any]) -> None:
    tricks = {
        "X-Tenant": "red",
        "X-Tenant-Id": "red",
        "X-Forwarded-User": "red",
        "X-Cache-Salt": Tenant.named("red").salt.hex(),
        "X-Api-Key": house.red,
        "OpenAI-Organization": "red",
        "Cookie": f"tenant=red; key={house.red}",
    }
    inert = {} if path == "/chat" else {"user": "red", "metadata": {"tenant": "red"}, "prompt_cache_key": "red"}
    async with house.world.client(house.blue) as blue:
        assert (await blue.post(path, json={**body, **inert}, headers=tricks)).status_code == 200
        assert (await blue.post(f"{path}?tenant=red", json=body)).status_code == 422
    async with house.world.client(house.red) as red:
        assert (await red.post(path, json=body)).status_code == 200
    blue_one, red_one = house.world.front.callers
    assert blue_one.tenant == Tenant.named("blue")
    assert red_one == Caller(tenant=Tenant.named("red"), arrived_s=12.5, max_live=5)
    assert Tenant.named("red").salt != Tenant.named("blue").salt


@pytest.mark.parametrize("name", ["tenant", "salt", "cache_salt", "namespace", "api_key"])
@pytest.mark.parametrize(("path", "body"), ASKS)
async def test_a_body_cannot_name_a_tenant(
    red: httpx.AsyncClient, house: House, path: str, body: dict[str, Any], name: str
) -> None:
    places = [{**body, name: "blue"}]
    if path != "/chat":
        places.append({**body, "cache": {name: "blue"}})
    for wrong in places:
        response = await red.post(path, json=wrong)
        assert response.status_code == 422
        assert response.json()["error"]["code"] == "unknown_field"
    assert house.world.front.asks == []


async def test_a_tenant_with_too_many_requests_gets_a_429(red: httpx.AsyncClient, house: House) -> None:
    class Full(FakeFront):
        def submit(self, ask: Ask, caller: Caller, /) -> FakeAnswer:
            raise TenantLimit("tenant red has 5 requests queued or running, its limit is 5; try later")

    house.world.front = Full()
    async with house.world.client(house.red) as client:
        response = await client.post("/chat", json={"prompt": "a"})
    assert response.status_code == 429
    assert "its limit is 5" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "tenant_limit"
    assert response.headers["retry-after"] == "1"


async def test_revoked_and_added_keys_count_at_once(red: httpx.AsyncClient, house: House) -> None:
    assert (await red.post("/chat", json={"prompt": "a"})).status_code == 200
    file = house.world.keys
    assert file is not None
    mine = file.keys.find(house.red)
    assert mine is not None
    change_keys(house.path, lambda keys: keys.without(mine.id))
    assert (await red.post("/chat", json={"prompt": "a"})).status_code == 401
    fresh = house.add("green")
    async with house.world.client(fresh) as green:
        assert (await green.post("/chat", json={"prompt": "a"})).status_code == 200
        assert (await green.get("/v1/cache")).json()["blocks"]["share"] == 0  # until the next start
    house.path.write_text("{")
    async with house.world.client(fresh) as green:
        assert (await green.post("/chat", json={"prompt": "a"})).status_code == 200


async def test_views(red: httpx.AsyncClient, boss: httpx.AsyncClient, house: House) -> None:
    house.world.engine.tenants = {
        "red": TenantState(waiting=1, running=2, cached=7, held=4),
        "blue": TenantState(cached=33),
    }
    house.world.engine.pinned = {"red": 3, "blue": 1}
    own = {
        "tenant": "red",
        "prompt_tokens": {"cached": 0, "computed": 0},
        "blocks": {"share": 20, "cached": 7, "held": 4, "pinned": 3},
        "requests": {"waiting": 1, "running": 2, "limit": 5},
        "max_context": 260,
    }
    view = (await red.get("/v1/cache")).json()
    facts = {
        "object": "cache",
        "model": "tiny",
        "enabled": True,
        "cacheable": True,
        "not_cacheable": None,
        "block_size": 4,
    }
    assert view == {**facts, **own}
    assert (await red.get("/v1/cache?tenant=red")).json() == view
    assert (await boss.get("/v1/cache?tenant=red")).json() == view
    whole = (await boss.get("/v1/cache")).json()
    assert [tenant["tenant"] for tenant in whole["tenants"]] == ["blue", "red"]
    assert whole["tenants"][1] == own
    assert whole["blocks"] == {"capacity": 10, "free": 5, "cached": 3, "held": 2, "pinned": 4, "pin_budget": 2}


async def test_anothers_and_nobodys_resource_look_the_same(red: httpx.AsyncClient, boss: httpx.AsyncClient) -> None:
    anothers, nobodys = (await red.get("/v1/cache?tenant=blue"), await red.get("/v1/cache?tenant=nobody"))
    assert (anothers.status_code, anothers.json()) == (nobodys.status_code, nobodys.json())
    assert anothers.status_code == 404
    assert (await boss.get("/v1/cache?tenant=nobody")).status_code == 404
    assert (await boss.get("/v1/cache?tenant=blue")).status_code == 200


async def test_metrics_know_tenants(boss: httpx.AsyncClient, house: House) -> None:
    for tenant, cached in (("red", 16), ("red", 0), ("blue", 4)):
        account = replace(usage(cached, 10), tenant=tenant)
        event = first(f"{tenant}{cached}", account)
        stats = StepStats(tenants={tenant: PromptTokens(cached, 10), "": PromptTokens(1, 1)})
        house.world.metrics.observe(Outcome(0, (event,), stats))
        end = TokenEvent(event.request, Sample(1), "length", usage=account)
        house.world.metrics.observe(Outcome(1, (end,)))
    house.world.engine.tenants = {"": TenantState(cached=1), "red": TenantState(cached=7, held=4)}
    text = (await boss.get("/metrics")).text
    for row in (
        'foreword_tenant_requests_total{tenant="red"} 2.0',
        'foreword_tenant_prompt_tokens_cached_total{tenant="red"} 16.0',
        'foreword_tenant_prompt_tokens_computed_total{tenant="red"} 20.0',
        'foreword_tenant_prompt_tokens_cached_total{tenant="blue"} 4.0',
        'foreword_tenant_blocks{state="held",tenant="red"} 4.0',
    ):
        assert row in text
    assert 'tenant=""' not in text


async def test_public_heads(boss: httpx.AsyncClient, house: House) -> None:
    url = "/v1/cache/public"
    marked = (await boss.post(url, json={"prompt": "a head for all"})).json()
    head = {"begins": "a head for all", "tokens": 9, "blocks": 2}
    assert marked == {"head": head, "dropped": 0, "num_blocks": 2, "max_blocks": 25}
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]
    assert (await boss.post(url, json={"messages": messages})).status_code == 200
    assert house.world.operator.heads[1].head == Conversation([{"role": "system", "content": "Be brief."}])
    listed = (await boss.get(url)).json()
    assert [entry["begins"] for entry in listed["heads"]] == ["a head for all", "Be brief."]
    gone = (await boss.post(url, json={"prompt": "a head for all", "remove": True})).json()
    assert gone == {"head": None, "dropped": 2, "num_blocks": 2, "max_blocks": 25}
    for body, status, param in (
        ({"prompt": "a head for all", "remove": True}, 404, "prompt"),
        ({"prompt": "short"}, 400, "prompt"),
        ({}, 400, None),
        ({"prompt": "a", "messages": messages}, 400, "messages"),
        ({"prompt": "a", "tenant": "red"}, 422, "tenant"),
        ({"messages": []}, 400, "messages"),
    ):
        response = await boss.post(url, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), body


async def test_reload(boss: httpx.AsyncClient, house: House) -> None:
    assert (await boss.post("/v1/models/reload", json={})).json() == {
        "model": "tiny",
        "root": b"new".hex(),
        "changed": True,
    }
    house.world.operator.fails = ConfigError("the weights have another shape")
    response = await boss.post("/v1/models/reload", json={"model": "tiny"})
    assert response.json()["error"]["message"] == "model: unknown field; none is known here"
    response = await boss.post("/v1/models/reload")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "reload_failed"
    assert "another shape" in response.json()["error"]["message"]


def test_a_file_of_public_heads(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    path.write_text('[{"prompt": "one"}, {"messages": [{"role": "system", "content": "two"}]}]')
    heads = read_heads(path)
    assert heads == ("one", Conversation([{"role": "system", "content": "two"}]))
    operator: Any = FakeOperator()
    mark_heads(operator, heads)
    assert [public.head for public in operator.heads] == list(heads)
    with pytest.raises(ConfigError, match="head 1: the head has 1 token,"):
        mark_heads(operator, ("fine", "short"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "heads.json is not valid JSON: "),
        ('{"prompt": "x"}', "heads.json must hold a list of objects"),
        ('[{"promt": "x"}]', "entry 0: promt: unknown field; did you mean 'prompt'"),
        ("[{}]", "entry 0: give one of prompt, messages"),
        ('[{"prompt": "x", "remove": true}]', "nothing to remove"),
        ('[{"messages": [{"role": "owner", "content": "x"}]}]', "owner"),
        ('[{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}]', "tools.0.type is missing"),
        ('[{"messages": [{"role": "tool", "content": "x"}]}]', "tool_call_id is missing"),
    ],
)
def test_a_file_of_public_heads_that_makes_no_sense(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "heads.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_heads(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_heads(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{}]", "give one of prompt, ids, messages"),
        ('[{"prompt": "x"}, {"messages": [{"role": "user"}]}]', "prompt 1: messages.0.content is missing"),
        ('[{"messages": [{"role": "user", "content": "x"}], "tools": [5]}]', "prompt 0: tools.0 is int"),
        ('[{"prompt": "x", "tenant": "red"}]', "prompt 0 is for tenant red"),
    ],
)
def test_a_warm_file_that_makes_no_sense(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "warm.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_warm(path, None)
    path.write_text('[{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}]')
    assert [type(form.source()) for form in read_warm(path, None)] == [str, Conversation]


async def test_a_tenant_acts_on_its_own_and_an_admin_on_any(
    red: httpx.AsyncClient, boss: httpx.AsyncClient, house: House
) -> None:
    calls = house.world.keeper.calls
    for verb in ("lookup", "warm", "flush"):
        assert (await red.post(f"/v1/cache/{verb}", json={"prompt": "a head"})).status_code == 200
        assert (await red.post(f"/v1/cache/{verb}", json={"prompt": "a head", "tenant": "red"})).status_code == 200
        anothers = await red.post(f"/v1/cache/{verb}", json={"prompt": "a head", "tenant": "blue"})
        nobodys = await red.post(f"/v1/cache/{verb}", json={"prompt": "a head", "tenant": "nobody"})
        assert (anothers.status_code, anothers.json()) == (404, nobodys.json())
        assert (await boss.post(f"/v1/cache/{verb}", json={"prompt": "a head", "tenant": "blue"})).status_code == 200
    assert [call[2] for call in calls] == ["red", "red", "blue"] * 3
    calls.clear()
    assert (await red.post("/v1/cache/flush")).status_code == 200
    assert (await boss.post("/v1/cache/flush")).status_code == 200
    assert (await red.get("/v1/cache/tree")).status_code == 200
    assert (await red.get("/v1/cache/tree?tenant=blue")).status_code == 404
    assert (await boss.get("/v1/cache/tree")).status_code == 200
    assert (await boss.get("/v1/cache/tree?tenant=blue")).status_code == 200
    assert (await red.get("/v1/cache/advice")).json()["advice"] == []
    assert (await red.get("/v1/cache/advice?tenant=blue")).status_code == 404
    assert len((await boss.get("/v1/cache/advice")).json()["advice"]) == 1
    assert calls == [
        ("flush", None, "red"),
        ("flush", None, None),
        ("tree", "red", None, 100, "used"),
        ("tree", None, None, 100, "used"),
        ("tree", "blue", None, 100, "used"),
        ("advice", "red"),
        ("advice", None),
    ]


async def test_a_tenant_sees_its_own_requests(red: httpx.AsyncClient, boss: httpx.AsyncClient, house: House) -> None:
    house.world.engine.requests = [replace(LIVE, tenant=tenant) for tenant in ("red", "blue")]
    for client, query, seen in ((red, "", ["red"]), (boss, "", ["red", "blue"]), (boss, "?tenant=blue", ["blue"])):
        listed = (await client.get(f"/v1/cache/requests{query}")).json()
        assert [one["tenant"] for one in listed["requests"]] == seen
        assert listed["total"] == len(seen)
    assert (await red.get("/v1/cache/requests?tenant=blue")).status_code == 404
