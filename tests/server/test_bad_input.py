"""What a caller may do wrong: a 4xx in OpenAI's form that names the field, and the server goes on."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.server.fakes import World

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
ASK = [{"role": "user", "content": "hi"}]


async def refused(client: httpx.AsyncClient, url: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request that must not get through."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(url, content=content)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["type"] == ("rate_limit_error" if response.status_code == 429 else "invalid_request_error")
    return response.status_code, error


COMMON: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "gpt-9"}, 404, "model", "'gpt-9' does not exist here; there is: tiny, alias/tiny"),
    ({"model": 3}, 400, "model", "model is 3"),
    ({"temperature": float("nan")}, 400, "temperature", "temperature is NaN"),
    ({"temperature": float("inf")}, 400, "temperature", "temperature is Infinity"),
    ({"temperature": -0.1}, 400, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.5}, 400, "temperature", "less than or equal to 2"),
    ({"temperature": "1"}, 400, "temperature", "valid number"),
    ({"temperature": True}, 400, "temperature", "valid number"),
    ({"temperature": 10**400}, 400, "temperature", "temperature is a very large integer"),
    ({"top_p": 0}, 400, "top_p", "greater than 0"),
    ({"top_p": 1.1}, 400, "top_p", "less than or equal to 1"),
    ({"top_k": -1}, 400, "top_k", "top_k is -1"),
    ({"max_tokens": -1}, 400, "max_tokens", "max_tokens is -1"),
    ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "valid integer"),
    ({"max_tokens": "5"}, 400, "max_tokens", "'5'"),
    ({"max_tokens": 401}, 400, "max_tokens", "the context is 400"),
    ({"max_tokens": 2**80}, 400, "max_tokens", "max_tokens is"),
    ({"seed": 2**63}, 400, "seed", "seed is"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", "at most 4"),
    ({"stop": [1]}, 400, "stop.0", "valid string"),
    ({"stop": ""}, 400, "stop", "at least 1 character"),
    ({"stop": {"a": 1}}, 400, "stop", "stop is an object"),
    ({"stream": "yes"}, 400, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "needs stream: true"),
    ({"stream": True, "stream_options": {"usage": True}}, 422, "stream_options.usage", "include_usage"),
    ({"n": 2}, 400, "n", "n is 2: this value is not supported; leave the field out or send 1"),
    ({"n": True}, 400, "n", "not supported"),
    ({"n": 1.0}, 400, "n", "not supported"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
    ({"frequency_penalty": -1}, 400, "frequency_penalty", "not supported"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "not supported"),
    ({"prefix_length": 1}, 422, "prefix_length", 'prefix_length: unknown field; it goes into cache: {"prefix_length"'),
    ({"zebra": 1}, 422, "zebra", "zebra: unknown field; GET /openapi.json has all that are known"),
    ({"temperatur": 1}, 422, "temperatur", "did you mean 'temperature'?"),
    ({"cache": {"raport": True}}, 422, "cache.raport", "did you mean 'report'?"),
    ({"cache": {"tll": 3}}, 422, "cache.tll", "did you mean 'ttl'?"),
    ({"cache": {"prority": 3}}, 422, "cache.prority", "did you mean 'priority'?"),
    ({"cache": {"ttl": 0}}, 422, "cache.ttl", "greater than 0"),
    ({"cache": {"ttl": 1e12}}, 422, "cache.ttl", "less than or equal to 2678400"),
    ({"cache": {"ttl": "5"}}, 422, "cache.ttl", "valid number"),
    ({"cache": {"priority": 101}}, 422, "cache.priority", "less than or equal to 100"),
    ({"cache": {"priority": -1}}, 422, "cache.priority", "greater than or equal to 0"),
    ({"cache": {"key": "k" * 65}}, 422, "cache.key", "at most 64 characters"),
    ({"cache": {"read": 1}}, 422, "cache.read", "valid boolean"),
    ({"cache": {"store": "no"}}, 422, "cache.store", "valid boolean"),
    ({"cache": {"prefix_length": -1}}, 422, "cache.prefix_length", "greater than or equal to 0"),
    ({"cache": {"prefix_length": 9999}}, 422, "cache.prefix_length", "a prefix cannot be longer"),
    ({"cache": True}, 422, "cache", 'cache is true: it must be an object such as {"report": true}'),
    ({"cache": [1]}, 422, "cache", "cache is a list: it must be an object such as"),
    ({"stream": True, "stream_options": 1}, 400, "stream_options", "object such as {"),
]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("row", COMMON, ids=lambda row: str(row[0])[:60])
async def test_fields_of_both_routes(
    client: httpx.AsyncClient, world: World, url: str, row: tuple[dict[str, Any], int, str, str]
) -> None:
    fields, status, param, text = row
    body = {"messages": ASK} if url == CHAT else {"prompt": "abc"}
    got, error = await refused(client, url, {**body, **fields})
    assert (got, error["param"]) == (status, param)
    assert text in error["message"]
    assert world.front.answers == []
    assert (await client.post(url, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param", "text"),
    [
        ({}, 400, "prompt", "prompt is missing"),
        ({"prompt": ""}, 400, "prompt", "at least 1 character"),
        ({"prompt": []}, 400, "prompt", "at least 1 item"),
        ({"prompt": None}, 400, "prompt", "prompt is null"),
        ({"prompt": 5}, 400, "prompt", "prompt is 5"),
        ({"prompt": [[]]}, 400, "prompt.0", "at least 1 item"),
        ({"prompt": ["a", ""]}, 400, "prompt.1", "at least 1 character"),
        ({"prompt": ["a", 5]}, 400, "prompt.1", "valid string"),
        ({"prompt": ["a"] * 129}, 400, "prompt", "prompt has too many items: at most 128"),
        ({"prompt": [1, 2, "x"]}, 400, "prompt.2", "valid integer"),
        ({"prompt": [1, -2]}, 400, "prompt.1", "greater than or equal to 0"),
        ({"prompt": [1, 2**40]}, 400, "prompt.1", "less than"),
        ({"prompt": [1, 1000]}, 400, "prompt", "from 0 to 999"),
        ({"prompt": [1.5]}, 400, "prompt.0", "valid integer"),
        ({"prompt": "x" * 400}, 400, "prompt", "the prompt has 400 tokens"),
        ({"prompt": "x", "echo": True}, 400, "echo", "not supported"),
        ({"prompt": "x", "best_of": 2}, 400, "best_of", "not supported"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix", "not supported"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
        ({"prompt": "x", "logprobs": True}, 400, "logprobs", "valid integer"),
        ({"messages": ASK}, 422, "messages", "unknown field"),
    ],
    ids=str,
)
async def test_completions(
    client: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str, text: str
) -> None:
    got, error = await refused(client, COMPLETIONS, fields)
    assert (got, error["param"]) == (status, param)
    assert text in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "text"),
    [
        ({"messages": []}, 400, "messages", "messages is empty: give at least 1 item"),
        ({"messages": "hi"}, 400, "messages", "valid list"),
        ({"messages": [5]}, 400, "messages.0", 'it must be an object such as {"role": "user"'),
        ({"messages": [{"role": "user", "content": ["x"]}]}, 400, "messages.0.content.0", 'such as {"type": "text"'),
        ({"messages": [{"role": "user"}]}, 400, "messages.0.content", "missing"),
        ({"messages": [{"role": "assistant", "content": None}]}, 400, "messages.0.content", "null"),
        (
            {"messages": [{"role": "boss", "content": "x"}]},
            400,
            "messages.0.role",
            "'boss': input should be 'system', 'developer', 'user', 'assistant' or",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages.0.role", "a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id", "missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, 400, "messages.0.tool_call_id", "role"),
        ({"messages": [{"role": "user", "content": "x", "name": "Al"}]}, 400, "messages.0.name", "not supported"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, 422, "messages.0.mood", "unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages.0.content.0.type",
            "image_url is not supported; supported: text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            400,
            "messages.0.tool_calls.0.function",
            "missing",
        ),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages.0.content", "at least 1 item"),
        ({"messages": ASK, "tools": [{"type": "function"}]}, 422, "tools.0.function", "missing"),
        ({"messages": ASK, "tools": [{**TOOL, "x": 1}]}, 422, "tools.0.x", "unknown field; known are type, function"),
        ({"messages": ASK, "tools": "f"}, 422, "tools", "valid list"),
        ({"messages": ASK, "tools": [TOOL], "parallel_tool_calls": False}, 400, "parallel_tool_calls", "send true"),
        (
            {"messages": ASK, "tool_choice": "required"},
            400,
            "tool_choice",
            'not supported; leave the field out or send "auto"',
        ),
        ({"messages": ASK, "tool_choice": {"type": "function"}}, 400, "tool_choice", 'send "auto" or "none"'),
        ({"messages": ASK, "response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
        ({"messages": ASK, "modalities": ["audio"]}, 400, "modalities", "not supported"),
        ({"messages": ASK, "reasoning_effort": "high"}, 400, "reasoning_effort", "not supported"),
        ({"messages": ASK, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs: true"),
        ({"messages": ASK, "logprobs": 2}, 400, "logprobs", "valid boolean"),
        ({"messages": ASK, "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens", "differ"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "messages", "tokens"),
    ],
    ids=str,
)
async def test_chat(client: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str, text: str) -> None:
    got, error = await refused(client, CHAT, fields)
    assert (got, error["param"]) == (status, param)
    assert text in error["message"]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_values_that_change_nothing_are_accepted(client: httpx.AsyncClient, url: str) -> None:
    body: dict[str, Any] = {
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "stop": None,
        "seed": None,
        "stream": False,
        "stream_options": None,
        "cache": {"report": False, "prefix_length": None, "read": True, "store": True, "ttl": None},
    }
    if url == CHAT:
        body |= {
            "messages": ASK,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "reasoning_effort": None,
        }
    else:
        body |= {"prompt": "abc", "best_of": 1, "echo": False, "suffix": None}
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": "a"} x',
    ],
    ids=lambda body: repr(body[:20]),
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, "/chat"])
async def test_broken_json(client: httpx.AsyncClient, url: str, body: bytes) -> None:
    status, error = await refused(client, url, body)
    assert (status, error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"'])
async def test_json_that_is_no_object(client: httpx.AsyncClient, body: bytes) -> None:
    status, error = await refused(client, COMPLETIONS, body)
    assert (status, error["param"]) == (400, None)
    assert "it must be an object" in error["message"]
    assert "Request" not in error["message"]


async def test_one_error_for_many_wrong_things(client: httpx.AsyncClient) -> None:
    many = {f"field{i}": i for i in range(5000)}
    status, error = await refused(client, COMPLETIONS, {"prompt": "a", **many})
    assert (status, error["param"]) == (422, "field0")
    status, error = await refused(client, COMPLETIONS, {"prompt": ["a", *range(9000)]})
    assert error["param"] == "prompt.1"


async def test_a_long_wrong_value_is_not_sent_back(client: httpx.AsyncClient) -> None:
    _, error = await refused(client, COMPLETIONS, {"prompt": "a", "stream": "x" * 50_000})
    assert len(error["message"]) < 300
    _, error = await refused(client, COMPLETIONS, {"prompt": "a", "x" * 50_000: 1})
    assert len(error["message"]) + len(error["param"]) < 500


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, "/chat"])
async def test_a_body_announced_too_large_is_not_read(client: httpx.AsyncClient, world: World, url: str) -> None:
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 2**20

    response = await client.post(url, content=body(), headers={"Content-Length": str(100 * 2**20)})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert "100000 bytes" in response.json()["error"]["message"]
    assert read == 0


async def test_a_body_that_turns_out_too_large_is_read_to_the_limit_only(client: httpx.AsyncClient) -> None:
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 40_000

    response = await client.post(COMPLETIONS, content=body())
    assert response.status_code == 413
    assert read <= 4


async def test_queue_full(client: httpx.AsyncClient, world: World) -> None:
    world.front.full_after = 0
    for url, body in (
        (CHAT, {"messages": ASK}),
        (COMPLETIONS, {"prompt": "a", "stream": True}),
        ("/chat", {"prompt": "a"}),
    ):
        response = await client.post(url, json=body)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"] == {
            "message": "there are 4 requests queued or running, the limit is 4; try later",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
    assert 'foreword_requests_refused_total{status="429"} 3.0' in (await client.get("/metrics")).text


async def test_an_engine_that_takes_nothing(client: httpx.AsyncClient, world: World) -> None:
    world.front.away = True
    response = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert "retry-after" in response.headers


@pytest.mark.parametrize(("path", "status"), [("/nope", 404), ("/v1/completions", 405), ("/v1/models/nope", 404)])
async def test_paths_and_methods(client: httpx.AsyncClient, path: str, status: int) -> None:
    response = await client.get(path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"] == "POST"
