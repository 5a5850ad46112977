"""A web page of another site must not reach a server that asks for no key."""

import pytest

from tests.server.fakes import World


@pytest.mark.parametrize("path", ["/v1/cache/flush", "/v1/models/reload", "/chat", "/v1/completions"])
async def test_a_foreign_page_is_refused_and_ours_is_served(path: str) -> None:
    world = World()
    async with world.client() as client:
        body = {"prompt": "hi", "model": "tiny"} if path == "/v1/completions" else {"prompt": "hi"}
        content = {} if "cache" in path or "reload" in path else body
        foreign = await client.post(path, json=content, headers={"origin": "http://evil.example"})
        assert foreign.status_code == 403
        assert foreign.json()["error"]["code"] == "foreign_origin"
        ours = await client.post(path, json=content, headers={"origin": "http://test"})
        assert ours.status_code == 200
