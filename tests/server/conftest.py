"""One app with fakes behind it."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.server.fakes import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.client() as client:
        yield client
