"""How answers end: well, by a fault, or because the client went away."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from foreword.front.ask import Ask, Caller
from tests.server.fakes import FakeAnswer, FakeFront, World
from tests.server.sse import events

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/completions", {"prompt": ["abc", "abd"]}),
    ("/v1/completions", {"prompt": "abc", "stream": True}),
    ("/v1/completions", {"prompt": ["abc", "abd"], "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/chat", {"prompt": "abc"}),
]


class Line:
    """An ASGI client that can hang up."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.hang_up = asyncio.Event()
        self._body = json.dumps(body).encode()
        self._asked = False
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_client_that_hangs_up_ends_its_answers(path: str, body: dict[str, Any]) -> None:
    world = World(front=FakeFront(endless=True))
    line = Line(path, body)
    app: Callable[..., Awaitable[None]] = world.app()
    serving = asyncio.create_task(app(line.scope, line.receive, line.send))
    wanted = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    await until(lambda: len(world.front.answers) == wanted)
    await asyncio.sleep(0.02)
    assert not serving.done()
    assert all(answer.num_cancels == 0 for answer in world.front.answers)
    line.hang_up.set()
    async with asyncio.timeout(1):
        await serving
    assert all(answer.num_cancels >= 1 for answer in world.front.answers)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_server_that_is_stopped_hard_ends_its_answers(path: str, body: dict[str, Any]) -> None:
    world = World(front=FakeFront(endless=True))
    line = Line(path, body)
    app: Callable[..., Awaitable[None]] = world.app()
    serving = asyncio.create_task(app(line.scope, line.receive, line.send))
    await until(lambda: len(world.front.answers) >= 1)
    await asyncio.sleep(0.02)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert all(answer.num_cancels >= 1 for answer in world.front.answers)


async def test_a_client_that_hangs_up_while_its_prompt_is_read() -> None:
    class SlowFront(FakeFront):
        def submit(self, ask: Ask, caller: Caller, /) -> FakeAnswer:
            import time

            time.sleep(0.05)
            return FakeFront.submit(self, ask, caller)

    world = World(front=SlowFront(endless=True))
    line = Line("/v1/completions", {"prompt": "abc"})
    line.hang_up.set()
    await world.app()(line.scope, line.receive, line.send)
    assert [answer.num_cancels >= 1 for answer in world.front.answers] == [True]


async def test_no_task_is_left_behind(client: httpx.AsyncClient) -> None:
    before = len(asyncio.all_tasks())
    for path, body in ROUTES:
        assert (await client.post(path, json=body)).status_code == 200
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_failed_step(client: httpx.AsyncClient, world: World, path: str, body: dict[str, Any]) -> None:
    world.front.finish, world.front.error = "error", "the forward pass failed: boom"
    response = await client.post(path, json=body)
    if body.get("stream"):
        assert response.status_code == 200
        error = events(response)[-1]["error"]
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "step_failed"
    assert "boom" in error["message"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_an_engine_that_dies_meanwhile(
    client: httpx.AsyncClient, world: World, path: str, body: dict[str, Any]
) -> None:
    world.front.finish, world.front.error = "cancelled", "the engine died: boom"
    response = await client.post(path, json=body)
    error = events(response)[-1]["error"] if body.get("stream") else response.json()["error"]
    assert (error["code"], error["message"]) == ("unavailable", "the engine died: boom")
    assert body.get("stream") or response.headers["retry-after"] == "10"
    assert response.status_code == (200 if body.get("stream") else 503)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_server_that_cuts_answers_short(
    client: httpx.AsyncClient, world: World, path: str, body: dict[str, Any]
) -> None:
    world.front.finish = "cancelled"
    response = await client.post(path, json=body)
    error = events(response)[-1]["error"] if body.get("stream") else response.json()["error"]
    assert "stopping" in error["message"]
    assert response.status_code == (200 if body.get("stream") else 503)


async def test_a_fault_of_ours_shows_nothing_of_its_inside(world: World) -> None:
    class Broken(FakeFront):
        def submit(self, ask: Ask, caller: Caller, /) -> FakeAnswer:
            raise ZeroDivisionError("a secret path")

    async with World(front=Broken()).client() as client:
        response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
