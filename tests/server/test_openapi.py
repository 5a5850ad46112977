"""The API's description is complete and points nowhere outside itself."""

import json
import re
from typing import Any

import httpx

from foreword.server.admin import PublicHeadRequest
from foreword.server.cache_api import FlushRequest, LookupRequest, PinRequest, PrefixRequest, WarmRequest
from foreword.server.chat import PlainRequest
from foreword.server.openai.requests import ChatRequest, CompletionRequest


async def test_every_reference_resolves(client: httpx.AsyncClient) -> None:
    text = (await client.get("/openapi.json")).text
    names = set(json.loads(text)["components"]["schemas"])
    used = set(re.findall(r"#/components/schemas/([\w.-]+)", text))
    assert used <= names
    assert {"ChatRequest", "CompletionRequest", "PlainRequest", "ErrorReply"} <= used


async def test_routes(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/",
        "/v1/chat/completions",
        "/v1/completions",
        "/chat",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/models/reload",
        "/v1/cache",
        "/v1/cache/advice",
        "/v1/cache/flush",
        "/v1/cache/lookup",
        "/v1/cache/pin",
        "/v1/cache/public",
        "/v1/cache/requests",
        "/v1/cache/tree",
        "/v1/cache/unpin",
        "/v1/cache/warm",
        "/health",
        "/ready",
        "/metrics",
    }
    for path in ("/v1/chat/completions", "/v1/completions", "/chat"):
        route = document["paths"][path]["post"]
        assert {"200", "400", "401", "404", "413", "422", "429", "500", "503"} <= set(route["responses"])
        assert route["requestBody"]["required"]


async def test_bodies_are_closed(client: httpx.AsyncClient) -> None:
    schemas: dict[str, Any] = (await client.get("/openapi.json")).json()["components"]["schemas"]
    forms = (ChatRequest, CompletionRequest, PlainRequest, PublicHeadRequest, LookupRequest, WarmRequest, PinRequest)
    for form in (*forms, PrefixRequest, FlushRequest):
        assert schemas[form.__name__]["additionalProperties"] is False
        assert set(schemas[form.__name__]["properties"]) == set(form.model_fields)
