"""What a URL may say: unknown query parameters, paths and methods are told the way on."""

import httpx
import pytest

from tests.server.fakes import World


@pytest.mark.parametrize(
    ("method", "url", "told"),
    [
        ("GET", "/v1/cache?tenat=A", "tenat: unknown query parameter; did you mean 'tenant'?"),
        ("GET", "/v1/cache/tree?limt=2", "limt: unknown query parameter; did you mean 'limit'?"),
        ("GET", "/v1/cache/tree?limit=2&zebra=", "zebra: unknown query parameter; known are tenant, start, limit"),
        ("GET", "/v1/cache/tree?limit=2&limit=3", "limit: it is given more than once"),
        ("GET", "/v1/models?limit=2", "limit: unknown query parameter; /v1/models takes none"),
        ("GET", "/v1/models/tiny?x=1", "x: unknown query parameter; /v1/models/tiny takes none"),
        ("GET", "/v1/cache/public?all=1", "all: unknown query parameter; /v1/cache/public takes none"),
        ("GET", "/metrics?name=a", "name: unknown query parameter; /metrics takes none"),
        (
            "POST",
            "/v1/chat/completions?stream=true",
            "stream: unknown query parameter; /v1/chat/completions takes none",
        ),
        ("POST", "/v1/completions?cache=1", "cache: unknown query parameter; /v1/completions takes none"),
        ("POST", "/v1/cache/lookup?tenant=A", "tenant: unknown query parameter; /v1/cache/lookup takes none"),
        ("POST", "/v1/cache/flush?tenant=A", "tenant: unknown query parameter; /v1/cache/flush takes none"),
        ("POST", "/v1/models/reload?now=1", "now: unknown query parameter; /v1/models/reload takes none"),
        ("POST", "/chat?report=1", "report: unknown query parameter; /chat takes none"),
    ],
)
async def test_unknown_query_parameters(
    client: httpx.AsyncClient, world: World, method: str, url: str, told: str
) -> None:
    param = told.split(":", maxsplit=1)[0]
    response = await client.request(method, url, json={"prompt": "a"} if method == "POST" else None)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, param)
    assert told in error["message"]
    assert world.keeper.calls == world.front.asks == []


async def test_known_query_parameters(client: httpx.AsyncClient) -> None:
    for url in ("/v1/cache", "/v1/cache/tree", "/v1/cache/tree?limit=2", "/v1/models", "/metrics"):
        assert (await client.get(url)).status_code == 200, url


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions? An OpenAI client wants a base_url that ends"),
        ("GET", "/models", "did you mean /v1/models?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/v1/cache/tre", "did you mean /v1/cache/tree?"),
        ("GET", "/zebra", "there is no such path; GET / lists the routes."),
    ],
)
async def test_unknown_paths(client: httpx.AsyncClient, method: str, path: str, told: str) -> None:
    response = await client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert told in error["message"]
    assert "GET / lists the routes" in error["message"]
    assert ("did you mean" in error["message"]) == ("did you mean" in told)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/cache", "GET, HEAD"),
        ("POST", "/v1/models/tiny", "GET, HEAD"),
        ("DELETE", "/v1/cache/public", "GET, HEAD, POST"),
    ],
)
async def test_wrong_methods(client: httpx.AsyncClient, method: str, path: str, allowed: str) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    message = response.json()["error"]["message"]
    told = allowed.replace(", HEAD", "").replace(", ", " and ")
    assert message == f"{method} {path}: this path takes {told} only."


PATHS = ("/", "/health", "/ready", "/metrics", "/dashboard", "/dashboard/style.css", "/v1/models", "/v1/models/tiny")


@pytest.mark.parametrize("path", [*PATHS, "/v1/cache", "/openapi.json", "/nowhere", "/v1/models/zebra"])
async def test_head_is_get_without_the_body(client: httpx.AsyncClient, path: str) -> None:
    whole, head = await client.get(path), await client.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers.keys() == whole.headers.keys()
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":  # it counts what was refused
        assert int(head.headers["content-length"]) == len(whole.content) > 0


async def test_head_of_what_is_only_posted_to(client: httpx.AsyncClient, world: World) -> None:
    reply = await client.head("/v1/cache/flush")
    assert (reply.status_code, reply.headers["allow"], reply.content) == (405, "POST", b"")
    assert world.keeper.calls == []
