"""`POST /chat`: the plain form. A prompt in, its answer and what the cache did for it out."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import Request
from pydantic import model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from foreword.base.errors import RequestError
from foreword.front.ask import Ask
from foreword.server.auth import caller
from foreword.server.delivery import gathered, json_reply, opened
from foreword.server.errors import Refused, refusal_of, renamed, with_status
from foreword.server.intake import cache_wishes, read
from foreword.server.report import report_of
from foreword.server.service import Answer, service_of
from foreword.server.wire import CacheReport, CacheWish, NumTokens, PrefixLength, Reply, Temperature, Text, Wire


class PlainRequest(Wire):
    """A prompt, taken raw and tokenised as `/v1/completions` does."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "stream": "use /v1/completions or /v1/chat/completions to stream",
        "messages": "use /v1/chat/completions",
    }

    prompt: Text
    prefix_length: PrefixLength | None = None
    """Reads never pass this many tokens; stored are the full blocks that hold at least one of them."""
    max_tokens: NumTokens = 64
    temperature: Temperature = 0.0
    """0 takes the most likely token."""
    cache: CacheWish = CacheWish()
    """As on the other routes; the report always comes."""

    @model_validator(mode="after")
    def _check_prefix_length(self) -> "PlainRequest":
        if self.prefix_length is not None and self.cache.prefix_length not in (None, self.prefix_length):
            text = "it is another name of prefix_length here, and the two differ"
            raise PydanticCustomError("field_pair", text, {"name": "cache.prefix_length"})
        return self


class PlainReply(Reply):
    """The answer with its account."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    prefix_length: int | None
    cache: CacheReport


async def create_chat(request: Request) -> Response:
    """Continue a prompt and say what the cache did."""
    service = service_of(request)
    form = await read(request, PlainRequest)
    who = caller(request)
    prefix_length = form.cache.prefix_length if form.prefix_length is None else form.prefix_length
    wishes: dict[str, Any] = {**cache_wishes(form.cache), "prefix_length": prefix_length, "report": True}
    ask = Ask(
        prompt=form.prompt,
        max_tokens=form.max_tokens,
        temperature=form.temperature,
        **wishes,
    )

    def submit(answers: list[Answer]) -> None:
        answers.append(service.front.submit(ask, who))

    try:
        answers = await opened(submit)
    except RequestError as error:
        if error.field != "prefix_length":
            raise
        named = error if form.prefix_length is not None else renamed(error, {"prefix_length": "cache.prefix_length"})
        raise Refused(with_status(refusal_of(named), 422)) from None
    whole = (await gathered(request.receive, answers))[0]
    usage = whole.usage
    reply = PlainReply(
        text=whole.text,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        completion_tokens=usage.completion_tokens,
        prefix_length=prefix_length,
        cache=await report_of(usage, answers[0], service),
    )
    return json_reply(reply)
