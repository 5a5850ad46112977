"""Reading a stream of server-sent events."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[Any]:
    """The JSON objects of a stream, whose end must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
