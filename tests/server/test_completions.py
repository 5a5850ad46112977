"""POST /v1/completions: shapes, streaming, several prompts."""

from typing import Any

import httpx
import pytest

from tests.server.fakes import World
from tests.server.sse import events

URL = "/v1/completions"


async def test_whole_answer(client: httpx.AsyncClient, world: World) -> None:
    reply = (await client.post(URL, json={"model": "tiny", "prompt": "abcdefghi"})).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "tiny"
    assert isinstance(reply["created"], int)
    assert reply["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "cache" not in reply
    assert world.front.asks[0].temperature == 1.0
    assert world.front.asks[0].max_tokens is None


async def test_settings_reach_the_front(client: httpx.AsyncClient, world: World) -> None:
    body = {
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "seed": -3,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "logprobs": 2,
        "cache": {"prefix_length": 2},
    }
    assert (await client.post(URL, json=body)).status_code == 200
    ask = world.front.asks[0]
    assert ask.prompt == (1, 2, 3)
    assert (ask.max_tokens, ask.temperature, ask.top_p, ask.top_k, ask.seed) == (4, 0.0, 0.5, 7, -3)
    assert (ask.stop, ask.ignore_eos, ask.logprobs, ask.prefix_length) == (("a", "b"), True, 2, 2)


async def test_a_single_stop_string(client: httpx.AsyncClient, world: World) -> None:
    await client.post(URL, json={"prompt": "a", "stop": "END"})
    assert world.front.asks[0].stop == ("END",)


async def test_logprobs(client: httpx.AsyncClient) -> None:
    reply = (await client.post(URL, json={"prompt": "a", "max_tokens": 2, "logprobs": 2})).json()
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["h", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"h": -0.5, "z": -1.5}, {"e": -0.5, "z": -1.5}],
        "text_offset": [0, 1],
    }
    assert reply["choices"][0]["finish_reason"] == "length"
    reply = (await client.post(URL, json={"prompt": "a", "max_tokens": 1, "logprobs": 0})).json()
    assert reply["choices"][0]["logprobs"]["top_logprobs"] is None
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]


async def test_stream(client: httpx.AsyncClient) -> None:
    body = {"prompt": "abcdefghi", "stream": True, "logprobs": 1, "stream_options": {"include_usage": True}}
    chunks = events(await client.post(URL, json=body))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    *pieces, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in pieces] == [None] * 5 + ["stop"]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in pieces[:5]] == [[0], [1], [2], [3], [4]]
    assert all(chunk["usage"] is None for chunk in pieces)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_stream_without_usage(client: httpx.AsyncClient) -> None:
    chunks = events(await client.post(URL, json={"prompt": "abc", "stream": True}))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_the_same_streamed_and_whole(client: httpx.AsyncClient, stream: bool) -> None:
    usages: list[Any] = []
    for prompt in ("x" * 21, "x" * 21, "x" * 9 + "y" * 9):
        body: dict[str, Any] = {"prompt": prompt, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = await client.post(URL, json=body)
        usages.append((events(response)[-1] if stream else response.json())["usage"])
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 20, 8]
    assert [usage["prompt_tokens"] for usage in usages] == [21, 21, 18]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("with_usage", [False, True])
async def test_report(client: httpx.AsyncClient, stream: bool, with_usage: bool) -> None:
    body: dict[str, Any] = {"prompt": "abcdefghi", "stream": stream, "cache": {"report": True}}
    if stream and with_usage:
        body["stream_options"] = {"include_usage": True}
    response = await client.post(URL, json=body)
    if stream:
        *others, last = events(response)
        assert all("cache" not in chunk for chunk in others)
    else:
        last = response.json()
    report = last["cache"]
    timings = report.pop("timings")
    assert report.pop("advice")["tokens_per_call"] == 693
    assert report == {
        "cached_tokens": 0,
        "computed_tokens": 9,
        "recomputed_tokens": 0,
        "recalled_tokens": 0,
        "reason": "never_seen",
        "at_token": 0,
        "tiers": {"device": 0},
        "tail_tokens": 0,
        "left": None,
        "where": {
            "message": 1,
            "role": "user",
            "tool": None,
            "offset": 3,
            "cached": "the 14:02",
            "prompt": "the 14:03",
        },
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "saved": {"prefill_flops": 0, "seconds": 0.0},
    }
    assert timings == {
        "queue_s": 0.001,
        "tokenize_s": 0.0005,
        "lookup_s": 0.002,
        "fetch_s": 0.0,
        "prefill_s": 0.003,
        "first_token_s": 0.004,
    }


@pytest.mark.parametrize("prompts", [["abc", "abd"], [[1, 2, 3], [1, 2]]])
async def test_several_prompts(client: httpx.AsyncClient, world: World, prompts: list[Any]) -> None:
    reply = (await client.post(URL, json={"prompt": prompts})).json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "hello"), (1, "hello")]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert reply["usage"]["completion_tokens"] == 10
    assert len(world.front.asks) == 2


async def test_several_prompts_streamed(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "b", "c"], "stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = events(await client.post(URL, json=body))
    texts, finishes = ["", "", ""], dict[int, str]()
    for chunk in pieces:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert texts == ["hello"] * 3
    assert finishes == dict.fromkeys(range(3), "stop")
    assert last["usage"]["total_tokens"] == 18


async def test_when_one_of_several_prompts_is_refused_none_runs(client: httpx.AsyncClient, world: World) -> None:
    world.front.full_after = 2
    assert (await client.post(URL, json={"prompt": ["a", "b", "c"]})).status_code == 429
    assert [answer.num_cancels for answer in world.front.answers] == [1, 1]


async def test_a_report_of_several_prompts_is_refused(client: httpx.AsyncClient, world: World) -> None:
    response = await client.post(URL, json={"prompt": ["a", "b"], "cache": {"report": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache.report"
    assert world.front.asks == []
