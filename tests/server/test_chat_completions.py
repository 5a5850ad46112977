"""POST /v1/chat/completions: shapes, streaming, messages."""

from typing import Any

import httpx
import pytest

from tests.server.fakes import World
from tests.server.sse import events

URL = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hi"}]


async def test_whole_answer(client: httpx.AsyncClient) -> None:
    reply = (await client.post(URL, json={"model": "alias/tiny", "messages": ASK})).json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "tiny"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert reply["usage"]["prompt_tokens"] == len("user:hi\n")
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_messages_reach_the_template(client: httpx.AsyncClient, world: World) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "user", "content": "and?"},
    ]
    assert (await client.post(URL, json={"messages": messages})).status_code == 200
    assert world.front.messages[0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(client: httpx.AsyncClient, world: World, name: str) -> None:
    reply = (await client.post(URL, json={"messages": ASK, name: 3})).json()
    assert reply["choices"][0]["message"]["content"] == "hel"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert world.front.asks[0].max_tokens == 3


async def test_logprobs(client: httpx.AsyncClient) -> None:
    body = {"messages": ASK, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    choice = (await client.post(URL, json=body)).json()["choices"][0]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "h",
                "logprob": -0.5,
                "bytes": [104],
                "top_logprobs": [
                    {"token": "h", "logprob": -0.5, "bytes": [104]},
                    {"token": "z", "logprob": -1.5, "bytes": [122]},
                ],
            }
        ],
        "refusal": None,
    }


async def test_logprobs_of_the_chosen_tokens_only(client: httpx.AsyncClient, world: World) -> None:
    choice = (await client.post(URL, json={"messages": ASK, "logprobs": True})).json()["choices"][0]
    assert world.front.asks[0].logprobs == 0
    assert [row["top_logprobs"] for row in choice["logprobs"]["content"]] == [[]] * 5
    await client.post(URL, json={"messages": ASK, "logprobs": False})
    assert world.front.asks[1].logprobs is None


async def test_stream(client: httpx.AsyncClient) -> None:
    body = {"messages": ASK, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    first, *pieces, end, last = events(await client.post(URL, json=body))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in pieces) == "hello"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in pieces)
    assert [chunk["choices"][0]["logprobs"]["content"][0]["token"] for chunk in pieces] == list("hello")
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == len("user:hi\n") + 5


@pytest.mark.parametrize("with_usage", [False, True])
async def test_report_is_on_the_last_chunk(client: httpx.AsyncClient, with_usage: bool) -> None:
    body: dict[str, Any] = {"messages": ASK, "stream": True, "cache": {"report": True}}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    *others, last = events(await client.post(URL, json=body))
    assert all("cache" not in chunk for chunk in others)
    assert last["cache"]["computed_tokens"] == len("user:hi\n")
    assert last["cache"]["timings"]["tokenize_s"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_the_same_streamed_and_whole(client: httpx.AsyncClient, stream: bool) -> None:
    found: list[int] = []
    for _ in range(2):
        body: dict[str, Any] = {"messages": ASK, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = await client.post(URL, json=body)
        usage = (events(response)[-1] if stream else response.json())["usage"]
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 4]


async def test_errors_name_the_fields_of_this_route(client: httpx.AsyncClient) -> None:
    long = [{"role": "user", "content": "x" * 500}]
    for body, param in (
        ({"messages": long}, "messages"),
        ({"messages": ASK, "max_tokens": 9999}, "max_tokens"),
        ({"messages": ASK, "max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"messages": ASK, "cache": {"prefix_length": 9999}}, "cache.prefix_length"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ):
        response = await client.post(URL, json=body)
        assert response.status_code == (422 if "cache" in body else 400)
        assert response.json()["error"]["param"] == param
