"""A web page must not reach a server under its own name, nor order anything from another site."""

import http.client
import socket
import threading
import time
from collections.abc import Generator

import pytest

from foreword.base.config import Config, ServerConfig
from foreword.base.errors import ConfigError
from foreword.server import Listener
from tests.server.fakes import World


def world_of(allowed: str | None = None, host: str = "127.0.0.1") -> World:
    return World(config=Config(server=ServerConfig(host=host, allowed_hosts=allowed, insecure=True)))


@pytest.fixture(scope="module")
def port() -> Generator[int]:
    """A server on a real socket, which may be called llm.example."""
    world = world_of("llm.example")
    listener = Listener(ServerConfig(port=0))
    thread = threading.Thread(target=listener.run, args=[world.app()])
    thread.start()
    while not listener.started:
        time.sleep(0.01)
    yield listener.port
    listener.stop()
    thread.join(10)
    assert not thread.is_alive()


def sent(port: int, lines: list[str], body: str = "") -> tuple[int, str]:
    """The status and the body that come back for these lines of a request, byte by byte what was written."""
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
        link.sendall((head + body).encode())
        response = http.client.HTTPResponse(link)
        response.begin()
        return response.status, response.read().decode()


OURS = [
    "localhost",
    "LocalHost:8000",
    "localhost.:8000",
    "app.localhost:8000",
    "127.0.0.1",
    "127.0.0.1:8000",
    "192.168.7.7:80",
    "[::1]",
    "[::1]:8000",
    "[fe80::1%25eth0]:8000",
    "llm.example",
    "LLM.example:8000",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example:8000",
    "localhost.evil.example",
    "evillocalhost",
    "sub.llm.example",
    "evil.example:80@localhost",
    "localhost@evil.example",
    "[evil.example]:8000",
    "::1",
    "localhost:evil",
    "localhost evil.example",
]


@pytest.mark.parametrize("path", ["/v1/cache/tree", "/health", "/dashboard", "/no-such-path"])
@pytest.mark.parametrize("host", OURS)
def test_a_name_of_ours_is_served(port: int, host: str, path: str) -> None:
    status, body = sent(port, [f"GET {path} HTTP/1.1", f"Host: {host}"])
    assert status == (404 if path == "/no-such-path" else 200)
    assert "foreign" not in body


@pytest.mark.parametrize("path", ["/v1/cache/tree", "/health", "/dashboard", "/no-such-path"])
@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_of_others_is_not(port: int, host: str, path: str) -> None:
    status, body = sent(port, [f"GET {path} HTTP/1.1", f"Host: {host}"])
    assert status == 403
    assert '"code":"foreign_host"' in body
    assert f"Host is '{host}'" in body
    assert "--allowed-hosts" in body


def test_the_way_out_names_the_name(port: int) -> None:
    body = sent(port, ["GET /health HTTP/1.1", "Host: llm.lan:8000"])[1]
    assert "start it with --allowed-hosts llm.lan" in body


def test_a_probe_without_a_host_is_served(port: int) -> None:
    assert sent(port, ["GET /health HTTP/1.0"])[0] == 200


@pytest.mark.parametrize("path", ["/v1/cache/flush", "/v1/completions", "/v1/cache/tree"])
def test_a_page_that_points_its_own_name_here_gets_nothing(port: int, path: str) -> None:
    lines = [f"POST {path} HTTP/1.1", "Host: evil.example:8000", "Origin: http://evil.example:8000"]
    status, body = sent(port, lines, '{"prompt": "hi"}')
    assert (status, '"code":"foreign_host"' in body) == (403, True)


@pytest.mark.parametrize(
    ("host", "allowed", "named"),
    [
        ("127.0.0.1", "one.example, Two.example", "two.example:8000"),
        ("my-machine", None, "My-Machine:8000"),
        ("127.0.0.1", "*", "anything.example"),
    ],
)
async def test_names_that_the_operator_gives(host: str, allowed: str | None, named: str) -> None:
    for world, status in ((world_of(allowed, host), 200), (world_of(), 403)):
        async with world.client() as client:
            assert (await client.get("/health", headers={"host": named})).status_code == status


@pytest.mark.parametrize("names", ["http://llm.example", "llm.example:8000", "a.example,,b.example", "*.example", ""])
def test_what_is_no_name_is_refused_at_the_start(names: str) -> None:
    with pytest.raises(ConfigError, match="without scheme and port"):
        ServerConfig(allowed_hosts=names)


async def test_a_refusal_is_counted() -> None:
    world = world_of()
    async with world.client() as client:
        await client.get("/health", headers={"host": "evil.example"})
        await client.post("/chat", json={"prompt": "hi"}, headers={"origin": "null"})
        text = (await client.get("/metrics")).text
    assert 'foreword_requests_refused_total{status="403"} 2.0' in text
    assert world.front.asks == []


@pytest.mark.parametrize("path", ["/v1/cache/flush", "/v1/models/reload", "/chat", "/v1/completions"])
async def test_a_foreign_page_is_refused_and_ours_is_served(path: str) -> None:
    world = World()
    async with world.client() as client:
        body = {"prompt": "hi", "model": "tiny"} if path == "/v1/completions" else {"prompt": "hi"}
        content = {} if "cache" in path or "reload" in path else body
        for origin in ("http://evil.example", "https://localhost.evil.example", "http://127.0.0.1:3000", "null", ""):
            foreign = await client.post(path, json=content, headers={"origin": origin})
            assert foreign.status_code == 403, origin
            assert foreign.json()["error"]["code"] == "foreign_origin"
        assert world.front.asks == world.keeper.calls == []
        ours = await client.post(path, json=content, headers={"origin": "http://localhost"})
        assert ours.status_code == 200


async def test_a_page_behind_a_proxy_is_ours_by_the_name_of_the_proxy() -> None:
    """A proxy often puts the address that it forwards to into `Host`; the page's `Origin` is the name of the proxy."""
    headers = {"host": "127.0.0.1:8000", "origin": "https://llm.example"}
    for allowed, status in (("llm.example", 200), (None, 403), ("*", 403)):
        async with world_of(allowed).client() as client:
            reply = await client.post("/chat", json={"prompt": "hi"}, headers=headers)
        assert reply.status_code == status
    assert "start it with --allowed-hosts llm.example" in reply.json()["error"]["message"]
