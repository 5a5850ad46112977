"""docs/api.md names every route and every field, whether it is served, inert or refused."""

import re

import pytest
from pydantic import BaseModel

from foreword.server.admin import PublicHeadRequest
from foreword.server.cache_api import FlushRequest, LookupRequest, PinRequest, PrefixRequest, WarmRequest
from foreword.server.chat import PlainRequest
from foreword.server.openai.requests import ChatMessage, ChatRequest, CompletionRequest, StreamOptions
from foreword.server.wire import CacheWish
from tests.architecture.source import PACKAGE, ROOT

FORMS = (
    ChatRequest,
    CompletionRequest,
    ChatMessage,
    PlainRequest,
    CacheWish,
    StreamOptions,
    PublicHeadRequest,
    LookupRequest,
    WarmRequest,
    PinRequest,
    PrefixRequest,
    FlushRequest,
)


@pytest.mark.parametrize("form", FORMS)
def test_the_api_page_names_every_field(form: type[BaseModel]) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in form.model_fields if f"`{name}`" not in text] == []


def test_the_api_page_names_every_route() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    app = (PACKAGE / "server" / "app.py").read_text(encoding="utf-8")
    paths = set(re.findall(r'app, "(/[a-z0-9/_]+)"|add_api_route\("([^"]+)"', app))
    assert len(paths) >= 8
    assert [path for pair in paths for path in pair if path and path.replace(":path", "") not in text] == []
