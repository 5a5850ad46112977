"""Routes for operators: public heads, reload. On a server with keys they need an admin key."""

import logging
from typing import Literal

import anyio.to_thread
from fastapi import Request
from pydantic import ConfigDict, model_validator

from foreword.base.errors import ForewordError, Unavailable
from foreword.front.operator import Head, PublicHead
from foreword.server.errors import Refusal, Refused
from foreword.server.intake import read
from foreword.server.openai.requests import Messages, Tools, check_tools, conversation
from foreword.server.service import Service, service_of
from foreword.server.wire import Reply, Text, Wire, check_one, described_as_one

_log = logging.getLogger(__name__)

_HEADS = ("prompt", "messages")


class Nothing(Wire):
    """A body without fields; it may be left out."""


class PublicHeadRequest(Wire):
    """`POST /v1/cache/public`: one of `prompt` and `messages`."""

    model_config = ConfigDict(json_schema_extra=lambda schema: described_as_one(schema, _HEADS))

    prompt: Text | None = None
    """Raw text, tokenised as `/v1/completions` does."""
    messages: Messages | None = None
    """What conversations begin with, such as the system prompt."""
    tools: Tools | None = None
    """With `messages`: what the model may call."""
    remove: bool = False
    """Share it no longer."""

    @model_validator(mode="after")
    def _check_one(self) -> "PublicHeadRequest":
        check_one(self, _HEADS)
        check_tools(self.tools, self.messages)
        return self

    def head(self) -> Head:
        """The same as a value."""
        return (self.prompt or "") if self.messages is None else conversation(self.messages, self.tools)


class Heads(Reply):
    """Blocks that all tenants share."""

    object: Literal["public_heads"] = "public_heads"
    num_blocks: int
    """Of all heads together; what two of them begin with counts once."""
    max_blocks: int
    heads: list["HeadReply"]


class HeadReply(Reply):
    """One public head."""

    begins: str
    """Its first characters, to know it by."""
    tokens: int
    blocks: int
    """Its full blocks; what comes after them is not shared."""


class HeadChanged(Reply):
    """What marking or removing did."""

    head: HeadReply | None = None
    """The head that is public now; null when it was removed."""
    dropped: int = 0
    """Blocks that were dropped from the cache."""
    num_blocks: int
    max_blocks: int


class ReloadReply(Reply):
    """What is served after a reload."""

    model: str
    root: str
    """Where all block hashes start; the same as before if the weights are."""
    changed: bool


async def reload(request: Request) -> ReloadReply:
    """Load the weights again; requests under way are finished first, new ones get 503 meanwhile."""
    await read(request, Nothing, default=b"{}")
    return await anyio.to_thread.run_sync(_reload, service_of(request))


async def get_public_heads(request: Request) -> Heads:
    """All public heads."""
    service = service_of(request)
    heads = await anyio.to_thread.run_sync(lambda: service.operator.heads)
    return Heads(
        num_blocks=service.operator.num_public_blocks,
        max_blocks=service.operator.max_public_blocks,
        heads=[_shown(head) for head in heads],
    )


async def change_public_heads(request: Request) -> HeadChanged:
    """Let all tenants share the full blocks of a head, or end that."""
    service = service_of(request)
    form = await read(request, PublicHeadRequest)
    if service.keys is None:
        message = "There are no API keys here, so there is one tenant and nobody to share with."
        raise Refused(Refusal(status=400, message=message, code="no_tenants"))
    return await anyio.to_thread.run_sync(_change, service, form)


def _change(service: Service, form: PublicHeadRequest) -> HeadChanged:
    operator, head = service.operator, form.head()
    marked, dropped = (None, operator.unmark(head)) if form.remove else (operator.mark(head), 0)
    return HeadChanged(
        head=None if marked is None else _shown(marked),
        dropped=dropped,
        num_blocks=operator.num_public_blocks,
        max_blocks=operator.max_public_blocks,
    )


def _reload(service: Service) -> ReloadReply:
    before = service.effective()["root"]
    try:
        root = service.operator.reload().hex()
    except Unavailable:
        raise
    except Exception as error:  # whatever a broken file makes of the loading, the old weights go on
        told = isinstance(error, ForewordError)  # then where in our code it was raised is no news
        _log.warning("the model was not reloaded: %s", error, exc_info=None if told else error)
        message = f"The model was not reloaded, and the old one goes on: {error}"
        raise Refused(Refusal(status=500, message=message, code="reload_failed")) from error
    return ReloadReply(model=service.models[0], root=root, changed=root != before)


def _shown(head: PublicHead) -> HeadReply:
    text = head.head if isinstance(head.head, str) else head.head.messages[0]["content"]
    return HeadReply(begins=text[:80], tokens=head.num_tokens, blocks=head.num_blocks)
