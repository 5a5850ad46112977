"""The clients that people have: OpenAI's and litellm read the usage of every answer rightly, streamed and whole."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import openai
import pytest

from tests.journeys.conftest import Running

MODEL = "SmolLM2-135M-Instruct"
TEXT = "The ferry to the island leaves at nine, at noon and at six from the pier behind the old customs house. "
ASKS = (TEXT * 2, TEXT * 2, TEXT + "Or does it?", "Something else entirely, of which nothing is known.")
"""Nothing is cached; all but the end is; a part is; next to nothing is."""
WISHES: Mapping[str, Any] = {"max_tokens": 3, "temperature": 0}

Client = Callable[..., Any]
"""Sends one request as this client's users do: `client(server, route, text, **more)`."""


def by_openai(server: Running, route: str, text: str, **more: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    if route == "chat":
        return client.chat.completions.create(model=MODEL, messages=[said(text)], **WISHES, **more)
    return client.completions.create(model=MODEL, prompt=text, **WISHES, **more)


def by_litellm(server: Running, route: str, text: str, **more: Any) -> Any:
    litellm = importlib.import_module("litellm")  # seconds, and only here
    more |= {"api_base": f"{server.url}/v1", "api_key": "none"}
    if route == "chat":
        return litellm.completion(model=f"openai/{MODEL}", messages=[said(text)], **WISHES, **more)
    return litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=text, **WISHES, **more)


def said(text: str) -> Any:
    return {"role": "user", "content": text}


CLIENTS: Mapping[str, Client] = {"openai": by_openai, "litellm": by_litellm}


def numbers(usage: Any) -> tuple[int, int, int]:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert type(usage.prompt_tokens_details.cached_tokens) is int
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("name", list(CLIENTS))
def test_what_a_client_reads_is_what_the_server_counts(server: Running, name: str, route: str) -> None:
    client, before = CLIENTS[name], server.metrics()
    whole = [numbers(client(server, route, text).usage) for text in ASKS]
    server.assembly.worker.flush()
    streamed: list[tuple[int, int, int]] = []
    for text in ASKS:
        chunks = list(client(server, route, text, stream=True, stream_options={"include_usage": True}))
        told = [chunk for chunk in chunks if getattr(chunk, "usage", None) is not None]
        assert [chunk.choices for chunk in told] == [[]]  # once, and apart from the text
        streamed.append(numbers(told[0].usage))
    assert streamed == whole
    prompts, cached, generated = zip(*whole, strict=True)
    block = server.assembly.limits.block_size
    assert cached[0] == 0
    assert cached[1] >= (prompts[1] - 1) // block * block > cached[2] > cached[3]
    assert set(generated) == {3}
    after = server.metrics()
    for counter, counts in (("prompt_tokens_cached", cached), ("tokens_generated", generated)):
        label = f"foreword_{counter}_total"
        assert after[label] - before[label] == 2 * sum(counts)


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("name", list(CLIENTS))
def test_a_stream_without_the_wish_carries_no_usage(server: Running, name: str, route: str) -> None:
    client = CLIENTS[name]
    client(server, route, TEXT)
    before = server.metrics()
    chunks = list(client(server, route, TEXT, stream=True))
    assert [chunk for chunk in chunks if getattr(chunk, "usage", None) is not None] == []
    assert "".join(filter(None, (text_of(chunk) for chunk in chunks)))
    counter = "foreword_prompt_tokens_cached_total"
    assert server.metrics()[counter] > before[counter]  # it was a hit all the same


def text_of(chunk: Any) -> str | None:
    choice = chunk.choices[0]
    return choice.delta.content if hasattr(choice, "delta") else choice.text


def test_the_report_reaches_both_clients(server: Running) -> None:
    for number, client in enumerate(CLIENTS.values()):
        answer = client(server, "chat", f"A report, please. {TEXT}", extra_body={"cache": {"report": True}})
        report = answer.model_dump()["cache"]
        assert report["reason"]
        assert report["cached_tokens"] == answer.usage.prompt_tokens_details.cached_tokens
        assert (report["cached_tokens"] > 0) == (number > 0)
